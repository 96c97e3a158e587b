"""What the OpenAPI document promises, held against a real server: requests that keep to it and
requests that do not, half of them about real jobs and models. `make fuzz` sends more of them.
"""

import sqlite3
from contextlib import closing
from itertools import product
from pathlib import Path

import httpx
import pytest
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup

from tests.fuzz.openapi import (
    CHECKS,
    EACH,
    MODELS,
    MODES,
    Sending,
    ask,
    document,
    faults,
    finished_jobs,
    operations_of,
)
from tests.fuzz.running import Outcome
from tests.service.builders.serving import serving_models
from tests.service.integration.test_server import send, serving, state_of, until


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_request_makes_the_server_break_its_word(tmp_path: Path) -> None:
    with serving_models(tmp_path, models=",".join(MODELS)) as server:
        jobs, operations = finished_jobs(server), operations_of(server)
        for operation, mode in product(operations, MODES):
            outcome = Outcome(operation.path)
            ask(operation, mode, jobs, Sending(EACH), outcome)
            assert outcome.cases or mode == GenerationMode.NEGATIVE
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
