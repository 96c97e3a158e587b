"""The cluster under faults: what its checks find, by doubles; and, slow, one of each fault and 200
races, against real processes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from benchmarks.faults.cluster.cluster_faults import (
    Record,
    Result,
    chosen_faults,
    missing,
    row_of,
    targets_of,
)
from benchmarks.faults.cluster.fault_list import FAULTS
from benchmarks.faults.cluster.load import Load, NoAnswer
from benchmarks.faults.cluster.truth import (
    lost_jobs,
    run_at_once,
    runs_in,
    wrong_events,
    wrong_reports,
    wrong_versions,
)
from service.devices.leases import utc_now
from service.jobs.state import Job, Started, Succeeded
from service.jobs.store import JobStore
from service.storage.database import Database
from service.storage.files import StoredFile
from tests.benchmarks.http_double import CLOSE, Answer, answering

ROOT = Path(__file__).parents[2]
NO_S3 = None


def write_run(folder: Path, job: str, run: str, *stamps: float) -> None:
    file = folder / job / run
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{each}\n" for each in stamps))


def test_runs_of_one_job_that_overlap_are_found(tmp_path: Path) -> None:
    write_run(tmp_path, "a", "one", 1.0, 2.0)
    write_run(tmp_path, "a", "two", 2.05, 3.0)
    write_run(tmp_path, "b", "one", 1.0, 2.0)
    assert list(run_at_once(runs_in(tmp_path))) == []
    write_run(tmp_path, "b", "two", 1.5, 3.0)
    assert list(run_at_once(runs_in(tmp_path))) == ["two runs of job b ran at once for 0.50 s"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with closing(Database(tmp_path / "crucible.db")) as database:
        yield JobStore(database)


def ended(store: JobStore, job_id: str, token: int = 0) -> None:
    now = utc_now()
    job = Job(id=job_id, owner="me", identity=job_id, name=job_id, device="cpu", created=str(now))
    stored = StoredFile(f"reports/{job_id}", "x", f"reports/{job_id}/{token}-a/b", "no digest", 1)
    store.add(job, now)
    store.append(job_id, Started(1, 1.0), now)
    store.append(job_id, Succeeded("accepted", None), now, files=[stored])


def test_what_the_database_lacks_is_found(store: JobStore) -> None:
    ended(store, "a")
    assert list(lost_jobs(store.database, {"a": "one"})) == []
    assert list(wrong_events(store.database)) == []
    (lost,) = lost_jobs(store.database, {"a": "one", "b": "two"})
    assert lost == "job b ('two') was accepted, and is not in the database"
    (unpublished,) = wrong_versions(store.database, {"m": ["a"]})
    assert unpublished == "the versions of 'm' are not the last promotions"


def test_a_job_that_has_not_ended_and_a_second_start_are_found(store: JobStore) -> None:
    now = utc_now()
    job = Job(id="a", owner="me", identity="a", name="a", device="cpu", created=str(now))
    store.add(job, now)
    (open_job,) = lost_jobs(store.database, {"a": "one"})
    assert open_job == "job a ('one') is queued, expected succeeded"
    (begun,) = wrong_events(store.database)
    assert "expected one begin, one end" in begun


def test_the_report_of_a_claim_that_was_lost_is_found(store: JobStore) -> None:
    ended(store, "a", token=7)
    found = list(wrong_reports(store.database, NO_S3, "bucket", "files", {}))
    assert found == ["job a has succeeded without a report"]


def asked(*answers: Answer) -> Load:
    """A load whose one client asks a server that gives these answers in turn."""
    turns = iter(answers)
    with answering(lambda path, body: next(turns)) as port:
        load = Load(f"http://127.0.0.1:{port}", 1)
        with httpx.Client(base_url=load.url) as client:
            load._ask(client, "POST", "/compile")
    return load


def refusal(status: int, **body: str) -> Answer:
    return (status, {"Retry-After": "0"}, json.dumps(body).encode())


def test_a_clear_refusal_and_a_broken_connection_are_tried_again() -> None:
    clear = refusal(503, error="it is away", code="host.store", next="try again")
    load = asked(clear, CLOSE, (200, {}, b"{}"))
    assert dict(load.outcomes) == {"refused": 1, "broken": 1, "answered": 1}


@pytest.mark.parametrize(
    "answer", [refusal(500, error="a", code="b", next="c"), refusal(503, error="a"), (503, {}, b"")]
)
def test_any_other_answer_is_a_fault(answer: Answer) -> None:
    with pytest.raises(NoAnswer, match="POST /compile: 50"):
        asked(answer)


def test_targets_tell_what_was_violated() -> None:
    held, late = Result(FAULTS[0], recovery_s=3.0), Result(FAULTS[1], failures=["it did not"])
    targets = targets_of([held, late], {"no job is lost": [], "no job runs twice": ["one did"]})
    assert list(targets.values()) == [True, False, False, False]
    assert (row_of(held)["result"], row_of(late)["result"]) == ("held", "failed: it did not")
    assert chosen_faults(["SIGKILL", "proxy"]) == list(FAULTS[:3])


def test_a_run_that_is_stopped_leaves_what_it_has(tmp_path: Path) -> None:
    record = Record(Load("http://127.0.0.1:1", 1), faults_asked=2, races_asked=50, repeats=1)
    record.results.append(Result(FAULTS[0], recovery_s=3.0))
    record.keep(tmp_path)
    (file,) = tmp_path.iterdir()
    document = json.loads(file.read_text(encoding="utf-8"))
    assert [row["result"] for row in document["rows"]] == ["held"]
    assert document["targets"]["the run came to its end (got 1 faults and 50 races left)"] is False
    assert (document["run"]["faults"], document["run"]["races_asked"]) == (1, 50)
    assert document["environment"]["cores"] > 0
    record.results.append(Result(FAULTS[1], failures=["it did not"]))
    record.keep(tmp_path)
    assert len(json.loads(file.read_text(encoding="utf-8"))["rows"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(bool(missing()), reason=f"cluster test: {missing()}")
def test_one_of_each_fault_and_200_races(tmp_path: Path) -> None:
    """Times are not judged: only what was lost, wrong, or did not hold."""
    command = [sys.executable, "-m", "benchmarks", "cluster_faults", "--races", "200"]
    result = subprocess.run(
        [*command, "--into", str(tmp_path)],
        cwd=ROOT,
        env=os.environ,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    document = json.loads((tmp_path / "cluster_faults.json").read_text(encoding="utf-8"))
    missed = [target for target, met in document["targets"].items() if not met]
    assert [target for target in missed if not target.startswith("recovered")] == []
    assert document["run"]["races"] == 200
