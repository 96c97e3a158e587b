"""Who may use /v1, and what the service writes down of it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from tests.service.builders.jobs import WITHIN_S
from tests.service.builders.serving import serving_models
from tests.service.builders.tensors import key_of
from tests.service.http.openai.streams import fault_of
from tests.service.integration.test_server import Server, until

SECRET = "purple-elephant"


def send(server: Server, key: str = "", **body: Any) -> httpx.Response:
    head = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": "capitals", "prompt": SECRET, **body}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=head, timeout=WITHIN_S)


def test_a_key_with_the_scope_infer_is_needed_and_sees_the_models_of_its_owner(
    tmp_path: Path,
) -> None:
    with serving_models(tmp_path, models="add", keys_required="true") as server:
        infer = key_of(tmp_path, "infer", owner="local")
        other = key_of(tmp_path, "infer", owner="other")
        compiles = key_of(tmp_path, "compile", owner="local")
        assert send(server, infer).json()["choices"][0]["text"] == SECRET.upper()
        for key, status, kind, code in (
            ("", 401, "authentication_error", "invalid_api_key"),
            ("crucible-wrong", 401, "authentication_error", "invalid_api_key"),
            (compiles, 403, "permission_error", "service.forbidden"),
            (other, 404, "invalid_request_error", "model_not_found"),
        ):
            refused, fault = fault_of(send(server, key))
            assert (refused, fault["type"], fault["code"]) == (status, kind, code)
        assert "`--scope infer`" in fault_of(send(server, compiles))[1]["message"]
        url, head = f"{server.url}/v1/models", {"Authorization": f"Bearer {infer}"}
        names = {each["id"] for each in httpx.get(url, headers=head).json()["data"]}
        assert "capitals" in names
        assert "foreign" not in names
        assert fault_of(httpx.get(f"{url}/foreign", headers=head))[0] == 404


def test_no_text_of_a_request_is_logged_or_audited(tmp_path: Path) -> None:
    with serving_models(tmp_path, models="add") as server:
        assert send(server).status_code == 200
        assert send(server, stop=[SECRET] * 5).status_code == 400
        assert send(server, model="lost", stream=True).status_code == 200
        assert send(server, model="lost").status_code == 503
        assert send(server, model="fails").status_code == 500
        until(lambda: server.log().count('"event": "request"') >= 5)
        written = server.log()
        assert server.end() == 0
    assert '"path": "/v1/completions"' in written
    assert SECRET not in written
    assert SECRET.upper() not in written
    with closing(sqlite3.connect(tmp_path / "crucible.db")) as rows:
        assert SECRET not in "\n".join(rows.iterdump())
