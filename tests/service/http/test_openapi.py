"""What the OpenAPI document promises, held against a real server: requests that keep to it and
requests that do not, half of them about real jobs and models.
"""

import json
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
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

from tests.service.builders.jobs import WITHIN_S
from tests.service.builders.serving import serving_models
from tests.service.integration.test_server import Server, send, serving, state_of, until

EACH = 15  # requests per operation and mode
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
MODELS = ("add", "photos", "same_float32")  # of the double
LIMITS = settings(
    max_examples=EACH,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def document(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def ask(operation: Any, mode: GenerationMode, jobs: list[str]) -> int:
    """Send generated requests, and check each answer; how many were sent."""
    sent = 0

    @LIMITS
    @given(
        case=operation.as_strategy(generation_mode=mode),
        job=some.sampled_from([None, *jobs]),
        model=some.sampled_from([None, *MODELS]),
    )
    def send(case: Any, job: str | None, model: str | None) -> None:
        nonlocal sent
        for name, real in (("job_id", job), ("name", model)):
            if real is not None and name in case.path_parameters:
                case.path_parameters[name] = real
        case.call_and_validate(checks=CHECKS, timeout=WITHIN_S)
        sent += 1

    with suppress(Unsatisfiable):  # what takes nothing cannot be asked wrongly
        send()
    return sent


def faults(log: str) -> list[str]:
    """Lines that no request may cause."""
    lines = [json.loads(line) for line in log.splitlines()]
    return [line for line in lines if line["level"] in ("error", "critical", "warning")]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_request_makes_the_server_break_its_word(tmp_path: Path) -> None:
    with serving_models(tmp_path, models=",".join(MODELS)) as server:
        jobs = [send(server, name) for name in ("succeed", "fail")]
        until(lambda: [state_of(server, job) for job in jobs] == ["succeeded", "failed"])
        operations = [result.ok() for result in document(server).get_all_operations()]
        for operation in operations:
            assert ask(operation, GenerationMode.POSITIVE, jobs) > 0
            ask(operation, GenerationMode.NEGATIVE, jobs)
        assert {
            "/compile",
            "/jobs/{job_id}/events",
            "/reports/{job_id}",
            "/infer",
            "/v2/models/{name}/infer",
        } <= {operation.path for operation in operations}
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        assert server.end() == 0
    assert faults(server.log()) == []


def test_a_fault_inside_is_still_found_so(tmp_path: Path) -> None:
    """A damaged row is ours to answer for: 500, and the check above sees it."""
    with serving(tmp_path) as server:
        job = send(server, "fail")
        until(lambda: state_of(server, job) == "failed")
        with closing(sqlite3.connect(tmp_path / "crucible.db")) as rows, rows:
            rows.execute("UPDATE jobs SET job = '{'")
        case = document(server)["/jobs/{job_id}"]["GET"].Case(path_parameters={"job_id": job})
        with pytest.raises(FailureGroup, match="Server error"):
            case.call_and_validate(checks=CHECKS)
        assert httpx.get(f"{server.url}/jobs").json() == {
            "jobs": [],
            "next": None,
        }  # the others are served
        assert send(server, "succeed")
    assert faults(server.log())
