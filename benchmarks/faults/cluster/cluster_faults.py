"""Two API servers and two nodes on one PostgreSQL and one S3, while hosts, the database and the
network fail: no job may be lost, run twice at once, or be published twice.

    python -m benchmarks cluster_faults [--faults WORD ...] [--races N] [--repeats N] [--into DIR]

Clients submit jobs through the proxy, read reports and promote them, and send a request again as a
good client does (load.py). One fault after another is brought about beside them (fault_list.py).
Then pairs of processes race for jobs, builds and publications (races.py). At the end the database,
S3 and the times at which the processes of jobs ran are compared with what clients were told
(truth.py).

The processes of jobs are doubles that take a second, but for one real compile. The time of a
recovery is from the fault's end until all hosts are back, all jobs that were open then have ended,
and so has a job submitted after it.

The result is written after each fault and every 50 races, with what is left: a run that is stopped
leaves its last one.

PostgreSQL crashes without losing its memory to the disk's: what a host's power failure does to
PostgreSQL is not tested. S3 is moto's, whose conditional writes are not used: locks are the
database's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.status import Status

from benchmarks.common import RESULTS, Row, argument_parser, keep, publish
from benchmarks.faults.cluster import truth
from benchmarks.faults.cluster.cluster import (
    BUCKET,
    FILES_URL,
    RACERS,
    Cluster,
    libfaketime,
    running_cluster,
)
from benchmarks.faults.cluster.fault_list import FAULTS, NUMBERS, Fault, NotHeld
from benchmarks.faults.cluster.job_worker import COMPILE
from benchmarks.faults.cluster.load import Load, NoAnswer
from benchmarks.faults.cluster.races import Races, racing, run_races
from benchmarks.serving.crucible import plan_of
from benchmarks.serving.models import write_small
from pipeline.errors import HostError
from service.routing.haproxy import program
from tests.service.builders.postgresql import missing as no_postgresql

NAME = "cluster_faults"
CLIENTS = 3
MAX_RECOVERY_S = 30.0
RECOVERY_S = 180.0  # after which it counts as none
ROWS = 4  # of the real compile


@dataclass(slots=True)
class Result:
    """What came of one fault."""

    fault: Fault
    recovery_s: float | None = None
    answered: int = 0
    refused: int = 0
    broken: int = 0
    failures: list[str] = field(default_factory=list)


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    if reason := missing():
        sys.exit(f"the cluster cannot run on this host: {reason}")
    with folder_of(arguments.folder) as folder, progress() as status:
        status.update("the cluster starts")
        with running_cluster(folder) as cluster:
            load = Load(cluster.proxy_url, CLIENTS)
            faults = chosen_faults(arguments.faults) * arguments.repeats
            record = Record(load, len(faults), arguments.races, arguments.repeats)
            with load.running(), compiling(load, cluster.folder):
                for fault in faults:
                    record.results.append(inject(cluster, load, fault, status))
                    record.keep(arguments.into)
            status.update("the database, S3 and the runs are compared")
            record.violations = {
                **checks(cluster, load),
                "no client saw a wrong answer": load.faults,
            }
            cluster.end_hosts()
            with racing(cluster, arguments.seed) as races:
                record.races = races
                record.violations["every race has one winner"] = races.faults

                def told(text: str) -> None:
                    status.update(text)
                    record.keep(arguments.into)

                run_races(races, arguments.races, told)
    publish(NAME, record.rows(), record.targets(), arguments.into, run=record.run())
    if problems := [each for found in record.violations.values() for each in found]:
        sys.exit("\n".join(problems[:20]))


@dataclass(slots=True)
class Record:
    """What a run has found so far. It is kept after each fault and every 50 races, so that a run
    that is stopped leaves its last result.
    """

    load: Load
    faults_asked: int
    races_asked: int
    repeats: int
    begun_s: float = field(default_factory=time.monotonic)
    results: list[Result] = field(default_factory=list)
    violations: dict[str, list[str]] = field(default_factory=dict)
    races: Races | None = None  # None: they have not begun

    def keep(self, into: Path) -> None:
        """Write the result so far."""
        keep(NAME, self.rows(), self.targets(), into, self.run())

    def rows(self) -> list[Row]:
        return [row_of(result) for result in self.results]

    def targets(self) -> dict[str, bool]:
        """Those of the results, and whether the run came to its end."""
        faults = self.faults_asked - len(self.results)
        races = self.races_asked - (self.races.run.total() if self.races else 0)
        ended = f"the run came to its end (got {faults} faults and {races} races left)"
        return {**targets_of(self.results, self.violations), ended: not faults and not races}

    def run(self) -> Row:
        """What was asked for, and what was done."""
        load, races = self.load, self.races
        won = [f"{races.won[name]} by {name}" for name in RACERS] if races else []
        return {
            "jobs": len(load.ended),
            "promotions": sum(map(len, load.promoted.values())),
            "answered": load.outcomes["answered"],
            "refused": load.outcomes["refused"],
            "broken": load.outcomes["broken"],
            "faults": len(self.results),
            "faults_asked": self.faults_asked,
            "races": races.run.total() if races else 0,
            "races_asked": self.races_asked,
            "races_won": ", ".join(won),
            "repeats": self.repeats,
            "minutes": (time.monotonic() - self.begun_s) / 60,
        }


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser(NAME, __doc__)
    parser.add_argument(
        "--faults",
        nargs="*",
        default=[""],
        metavar="WORD",
        help="only those with one of these words",
    )
    parser.add_argument("--races", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the races")
    parser.add_argument("--repeats", type=int, default=1, help="of all faults")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="keep the logs and homes in this empty folder"
    )
    parser.add_argument(
        "--into", type=Path, default=RESULTS, metavar="DIR", help="where the result goes"
    )
    return parser.parse_args(words)


def missing() -> str:
    """Why this host cannot run the cluster; empty if it can."""
    if reason := no_postgresql():
        return reason
    try:
        program()
    except HostError as error:
        return error.message
    if libfaketime() is None:
        return "no libfaketime: apt-get install faketime"
    absent = [name for name in ("moto", "s3fs") if find_spec(name) is None]
    return f"no {absent[0]}: install the extra `dev`" if absent else ""


def chosen_faults(words: Sequence[str]) -> list[Fault]:
    """The faults whose name has one of these words."""
    return [fault for fault in FAULTS if any(word in fault.name for word in words)]


@contextmanager
def folder_of(kept: Path | None) -> Iterator[Path]:
    """The folder of logs and homes: a temporary one, unless it is to be kept."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="crucible-cluster-") as folder:
        yield Path(folder)


@contextmanager
def progress() -> Iterator[Status]:
    """A line that tells what is done now."""
    with Console(stderr=True).status("") as status:
        yield status


@contextmanager
def compiling(load: Load, folder: Path) -> Iterator[None]:
    """Compile a model by the real worker, beside the first faults."""
    model = write_small(folder / "small.onnx", seed=0)
    upload = {
        "model": ("model.onnx", model.read_bytes()),
        "plan": ("plan.yaml", json.dumps(plan_of(COMPILE, ROWS)).encode()),
    }

    def compile_small() -> None:
        try:
            load.finish(load.submit(COMPILE, upload=upload))
        except NoAnswer as error:
            load.faults.append(str(error))

    thread = threading.Thread(target=compile_small)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def inject(cluster: Cluster, load: Load, fault: Fault, status: Status) -> Result:
    """Bring about a fault, and measure the recovery from it."""
    status.update(f"{fault.name}; {len(load.ended)} jobs have ended")
    result, before = Result(fault), Counter(load.outcomes)
    try:
        try:
            end = fault.run(cluster, load)
        except NotHeld as error:  # raised after the fault's end
            end = time.monotonic()
            result.failures.append(str(error))
        status.update(f"the cluster recovers after: {fault.name}")
        result.recovery_s = recover(cluster, load) - end
    except (NoAnswer, TimeoutError) as error:
        result.failures.append(str(error))
    result.answered, result.refused, result.broken = (
        load.outcomes[outcome] - before[outcome] for outcome in ("answered", "refused", "broken")
    )
    if result.broken and not fault.breaks:
        result.failures.append(f"{result.broken} connections broke, expected answers or refusals")
    return result


def recover(cluster: Cluster, load: Load) -> float:
    """Wait until all is as before the fault, and return when that was."""
    open_jobs = {job.id for job in cluster.jobs.unfinished() if job.name != COMPILE}
    load.run_job(f"probe-{next(NUMBERS)}")
    cluster.until(
        lambda: (
            cluster.is_whole() and not open_jobs & {job.id for job in cluster.jobs.unfinished()}
        ),
        "the recovery",
        RECOVERY_S,
    )
    return time.monotonic()


def checks(cluster: Cluster, load: Load) -> dict[str, list[str]]:
    """What must hold, and how it is violated."""
    runs = truth.runs_in(cluster.runs)
    database, prefix = cluster.database, FILES_URL.removeprefix(f"s3://{BUCKET}/")
    reports = truth.wrong_reports(database, cluster.s3, BUCKET, prefix, runs)
    return {
        "no job is lost": list(truth.lost_jobs(database, load.accepted)),
        "every job begins and ends once": list(truth.wrong_events(database)),
        "no job runs twice at once": list(truth.run_at_once(runs)),
        "no report is published twice": list(reports),
        "no version is published twice": list(truth.wrong_versions(database, load.promoted)),
        "the audit has no gap": list(truth.wrong_audit(database)),
    }


def row_of(result: Result) -> Row:
    return {
        "fault": result.fault.name,
        "what must hold": result.fault.holds,
        "recovery_s": result.recovery_s,
        "answered": result.answered,
        "refused": result.refused,
        "broken": result.broken,
        "result": f"failed: {result.failures[0]}" if result.failures else "held",
    }


def targets_of(results: Sequence[Result], violations: dict[str, list[str]]) -> dict[str, bool]:
    """The invariants, and the recoveries."""
    failures = sum(len(result.failures) for result in results)
    late_s = max((result.recovery_s or RECOVERY_S for result in results), default=0.0)
    return {
        **{f"{name} (got {len(found)})": not found for name, found in violations.items()},
        f"in every fault holds what must hold (got {failures} failures)": not failures,
        f"recovered within {MAX_RECOVERY_S:g} s (got {late_s:.3g} s)": late_s <= MAX_RECOVERY_S,
    }
