"""Checks that the attacks share. Each raises Fell with what came instead."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import httpx

from tests.attack.record import Fell
from tests.attack.targets import SECRET, Files, Server

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


def expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Fell(otherwise)


def refused(what: str, answer: httpx.Response, *statuses: int) -> str:
    """Return `status code` of a refusal with one of these statuses."""
    expect(answer.status_code in statuses, f"{what}: {answer.status_code} {answer.text[:200]}")
    code = answer.json()["code"] if answer.text.startswith("{") else ""
    return f"{answer.status_code} {code}".strip()


def counted(answers: Iterable[str]) -> str:
    """Return `404 service.not_found (2), ...`."""
    return ", ".join(f"{answer} ({count})" for answer, count in Counter(answers).items())


def refused_upload(server: Server, what: str, files: Files, *statuses: int) -> str:
    """Return how an upload was refused. It may leave no job and no file."""
    jobs, uploads = server.jobs(), server.uploads()
    with server.client() as client:
        how = refused(what, client.post("/compile", files=files), *statuses)
    expect(server.jobs() == jobs, f"{what}: {how}, but there is a job")
    expect(server.uploads() == uploads, f"{what}: {how}, but files are left")
    return how


def statuses_in(data: bytes) -> list[int]:
    """Return the statuses of all answers in the bytes of a connection."""
    return [int(status) for status in STATUS.findall(data)]


def check_no_secret(server: Server, where: str, text: str) -> None:
    """Fell if a text has the operator's secret, a key, or a path of the server's home."""
    secrets = {"the operator's secret": SECRET, "the home's path": str(server.home)}
    secrets |= {f"the key of {tenant}": key for tenant, key in server.keys.items()}
    for name, secret in secrets.items():
        expect(secret not in text, f"{where} shows {name}")
