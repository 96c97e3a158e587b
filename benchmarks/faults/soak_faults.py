"""A service whose host fails again and again, under load: nothing may be lost or wrong, and it must
recover soon.

    python -m benchmarks soak_faults [--requests N] [--faults N] [--fault-every S] [--into DIR]

One fault after another is brought about until there were enough faults and requests. Eight
connections send numbered requests with binary tensors, one more sends long JSON, and small models
are compiled one after another. Clients send a request again as a good client does (load.py). Each
answer is compared with that of the same engine in a direct Session, as in the soak. A supervisor
starts the server again whenever it ends.

The time of a recovery is from the fault to the first right answer of a request that was sent after
it. On a host with other load it is an upper bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.common import RESULTS, Row, argument_parser, beside, publish
from benchmarks.faults.fault_list import FAULTS, Fault, NotHeld, kill_server
from benchmarks.faults.host import Host, NotRun
from benchmarks.faults.load import Load
from benchmarks.serving.crucible import JOB_S, deploy, engine_folder, plan_of
from benchmarks.serving.models import write_small
from benchmarks.serving.soak import MAX_ROWS, direct_answers, told
from pipeline.errors import CrucibleError
from service.client import Client, RemoteError, Unreachable, Upload
from service.jobs.state import FINAL

MAX_RECOVERY_S = 5.0
RECOVERY_S = 60.0  # after which it counts as none
LOOK_S = 0.5
AGAIN = (429, 503, 507)
NO_RECOVERY = "no right answer"
DISK_FULL_JOB = "failed: host.disk_full"


@dataclass(slots=True)
class Outcome:
    """What came of one kind of fault."""

    fault: Fault
    injected: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    not_run: str = ""  # the reason


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    with tempfile.TemporaryDirectory(prefix="crucible-soak-") as text:
        folder = Path(text)
        host = Host(folder)
        outcomes = [Outcome(fault) for fault in FAULTS]
        jobs: Counter[str] = Counter()
        try:
            host.start()
            with Client(host.url) as client:
                job = deploy(
                    client, write_small(folder / "model.onnx", seed=0), plan_of("soak", MAX_ROWS)
                )
            load = Load(host.port, direct_answers(engine_folder(host.home, job)))
            seeds = itertools.count(1)
            begun = time.monotonic()
            with load.running(), beside(lambda: compile_one(host.url, folder, next(seeds), jobs)):
                inject_all(host, load, outcomes, arguments)
            minutes = (time.monotonic() - begun) / 60
        finally:
            host.close()
    publish(
        "soak_faults",
        [row_of(outcome) for outcome in outcomes],
        targets_of(load, outcomes, jobs, host.starts, arguments),
        arguments.into,
        run={
            "requests": load.sent,
            "faults": sum(outcome.injected for outcome in outcomes),
            "minutes": minutes,
            "fault_every_s": arguments.fault_every,
            "retries": load.retries,
            "jobs": told(jobs),
        },
    )
    if problems := [*load.lost, *load.wrong, *load.refused]:
        sys.exit("\n".join(problems[:10]))


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("soak_faults", __doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--fault-every", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument(
        "--into", type=Path, default=RESULTS, metavar="DIR", help="where the result goes"
    )
    return parser.parse_args(words)


# -- the faults --------------------------------------------------------------


def inject_all(
    host: Host, load: Load, outcomes: Sequence[Outcome], arguments: argparse.Namespace
) -> None:
    """Bring about one fault after another; then wait until there were enough requests."""
    injected = 0
    for outcome in itertools.cycle(outcomes):
        if injected >= arguments.faults or all(each.not_run for each in outcomes):
            break
        if outcome.not_run:
            continue
        begun = time.monotonic()
        inject(host, load, outcome)
        if not outcome.not_run:
            injected += 1
            time.sleep(max(0.0, begun + arguments.fault_every - time.monotonic()))
    while load.sent < arguments.requests:
        time.sleep(LOOK_S)


def inject(host: Host, load: Load, outcome: Outcome) -> None:
    """Bring about one fault, and measure the recovery from it."""
    recovery = load.watch(outcome.fault.kind)
    try:
        outcome.fault.run(host)
    except NotRun as error:
        outcome.not_run = str(error)
        return
    except (NotHeld, CrucibleError, httpx.HTTPError) as error:
        outcome.failures.append(str(error))
    outcome.injected += 1
    if recovery.answered.wait(RECOVERY_S):
        outcome.recoveries_s.append(recovery.seconds)
    else:
        outcome.failures.append(NO_RECOVERY)


# -- jobs beside it ----------------------------------------------------------


def compile_one(url: str, folder: Path, seed: int, ended: Counter[str]) -> None:
    """Compile a model of its own, sent again until it is accepted; `ended` counts how jobs end."""
    name = f"beside{seed}"
    model = write_small(folder / f"{name}.onnx", seed)
    plan = model.with_suffix(".plan.json")
    plan.write_text(json.dumps(plan_of(name, MAX_ROWS)), encoding="utf-8")
    job, until = "", time.monotonic() + JOB_S
    with Client(url) as client:
        while time.monotonic() < until:
            try:
                if not job:
                    job = client.submit(Upload(model, plan), idempotency_key=name).id
                view = client.job(job)
            except Unreachable:
                pass
            except RemoteError as error:
                if error.status not in AGAIN:
                    ended[f"{'vanished' if job else 'refused'}: {error.status}"] += 1
                    return
            else:
                if view.state in FINAL:
                    failure = f": {view.failure.code}" if view.failure else ""
                    ended[f"{view.state}{failure}"] += 1
                    return
            time.sleep(LOOK_S)
    ended["not ended"] += 1


# -- what came of it ---------------------------------------------------------


def summary(seconds: list[float]) -> tuple[float | None, float | None]:
    """The median and the maximum; None if there is nothing."""
    return (statistics.median(seconds), max(seconds)) if seconds else (None, None)


def row_of(outcome: Outcome) -> Row:
    median_s, worst_s = summary(outcome.recoveries_s)
    result = f"failed: {outcome.failures[0]}" if outcome.failures else "held"
    return {
        "fault": outcome.fault.name,
        "what must hold": outcome.fault.holds,
        "times": outcome.injected,
        "recovery_median_s": median_s,
        "recovery_worst_s": worst_s,
        "result": f"not run: {outcome.not_run}" if outcome.not_run else result,
    }


def targets_of(
    load: Load,
    outcomes: Sequence[Outcome],
    jobs: Mapping[str, int],
    starts: int,
    arguments: argparse.Namespace,
) -> dict[str, bool]:
    injected = sum(outcome.injected for outcome in outcomes)
    kills = sum(outcome.injected for outcome in outcomes if outcome.fault.run is kill_server)
    failures = sum(len(outcome.failures) for outcome in outcomes)
    _, worst_s = summary([each for outcome in outcomes for each in outcome.recoveries_s])
    return {
        (
            f"{arguments.requests:,} requests and {arguments.faults} faults"
            f" (got {load.sent:,} and {injected})"
        ): load.sent >= arguments.requests and injected >= arguments.faults,
        f"none lost (got {len(load.lost)})": not load.lost,
        f"none wrong (got {len(load.wrong)})": not load.wrong,
        f"none refused for good (got {len(load.refused)})": not load.refused,
        f"the server ends only if it is killed ({kills} kills, {starts} starts)": (
            starts == kills + 1
        ),
        f"in every fault holds what must hold (got {failures} failures)": (
            injected > 0 and not failures
        ),
        f"recovered within {MAX_RECOVERY_S:g} s (got {worst_s or 0:.3g} s)": (
            worst_s is not None and worst_s <= MAX_RECOVERY_S
        ),
        f"every job succeeds, or fails because the disk is full ({told(jobs)})": (
            "succeeded" in jobs and set(jobs) <= {"succeeded", DISK_FULL_JOB}
        ),
    }
