"""Requests from the OpenAPI document, sent to a real server, whose answers must conform to it."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as some
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz.running import Outcome
from tests.service.builders.jobs import WITHIN_S
from tests.service.builders.serving import serving_models
from tests.service.integration.test_server import Server, send, state_of, until

NAME = "openapi"
EACH = 15  # requests per operation and mode, in one round
SEEDS = 1000  # of rounds, for each seed of a run
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
MODELS = ("add", "photos", "same_float32")  # of the double
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


@dataclass(frozen=True, slots=True)
class Sending:
    """How many requests of an operation are sent in one mode, at most, and which."""

    count: int
    seed: int = 0


def document(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def operations_of(server: Server) -> list[Any]:
    return [result.ok() for result in document(server).get_all_operations()]


def finished_jobs(server: Server) -> list[str]:
    """Jobs that requests can be about."""
    jobs = [send(server, name) for name in ("succeed", "fail")]
    until(lambda: [state_of(server, job) for job in jobs] == ["succeeded", "failed"])
    return jobs


def ask(
    operation: Any, mode: GenerationMode, jobs: Sequence[str], plan: Sending, outcome: Outcome
) -> None:
    """Send generated requests, half of them about real jobs and models, and check and count each
    answer. FailureGroup if one does not conform.
    """

    @hypothesis.seed(plan.seed)
    @hypothesis.settings(
        max_examples=plan.count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=operation.as_strategy(generation_mode=mode),
        job=some.sampled_from([None, *jobs]),
        model=some.sampled_from([None, *MODELS]),
    )
    def send(case: Any, job: str | None, model: str | None) -> None:
        for name, real in (("job_id", job), ("name", model)):
            if real is not None and name in case.path_parameters:
                case.path_parameters[name] = real
        answer = case.call_and_validate(checks=CHECKS, timeout=WITHIN_S)
        outcome.cases += 1
        outcome.accepted += answer.status_code < 400
        outcome.refused += answer.status_code >= 400

    with suppress(Unsatisfiable):  # what takes nothing cannot be asked wrongly
        send()


def faults(log: str) -> list[str]:
    """Lines that no request may cause."""
    lines = [json.loads(line) for line in log.splitlines()]
    return [line for line in lines if line["level"] in ("error", "critical", "warning")]


def run(seed: int, cases: int, folder: Path, end_s: float = float("inf")) -> Outcome:
    """Send at least `cases` requests, in rounds over all operations. The memory is the server's."""
    outcome, begin_s, settled = Outcome(NAME), time.monotonic(), 0
    with (
        tempfile.TemporaryDirectory(prefix="crucible-fuzz-") as home,
        serving_models(Path(home), models=",".join(MODELS)) as server,
    ):
        jobs, operations = finished_jobs(server), operations_of(server)
        process = psutil.Process(server.process.pid)
        for number in itertools.count():
            if outcome.cases >= cases or time.monotonic() > end_s:
                break
            for operation, mode in itertools.product(operations, MODES):
                if time.monotonic() < end_s:
                    sending = Sending(EACH, seed * SEEDS + number)
                    _ask_or_report(operation, mode, jobs, sending, outcome, folder)
            size = process.memory_info().rss
            settled = settled or size
            outcome.peak_growth_bytes = max(outcome.peak_growth_bytes, size - settled)
        code, found = server.end(), faults(server.log())
        if code or found:
            file = folder / f"{NAME}-{seed}.log"
            file.write_text(server.log())
            outcome.failures[f"the server ended with {code}; its log: {found[:3]}"] = file
    outcome.seconds = time.monotonic() - begin_s
    return outcome


def _ask_or_report(
    operation: Any,
    mode: GenerationMode,
    jobs: Sequence[str],
    sending: Sending,
    outcome: Outcome,
    folder: Path,
) -> None:
    """Keep what does not conform, with the command that sends it again."""
    try:
        ask(operation, mode, jobs, sending, outcome)
    except FailureGroup as error:
        text = "".join(traceback.format_exception(error))
        file = folder / f"{NAME}-{len(outcome.failures)}.txt"
        file.write_text(text)
        outcome.failures[f"{operation.label}: {error}"[:500]] = file
