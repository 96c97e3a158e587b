"""Send mutated messages to every parser of the service: `python -m tests.fuzz [options]`.

Each case is decided by the target, the seed and its number. What no case may do is to raise another
error than the target's refusals, to be answered with 5xx, or to leave memory behind. Such a case is
written to a file in build/fuzz, and `--target NAME --replay FILE` reads it again.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.host.environment import environment
from service import logs
from service.settings import Settings
from tests.fuzz import openapi
from tests.fuzz.running import MAX_GROWTH_BYTES, Outcome, Target, run
from tests.fuzz.targets import TARGETS

FOLDER = Path("build/fuzz")
OPENAPI_SHARE = 100  # one of so many cases goes to the OpenAPI document's requests
COLUMNS = "{:16} {:>9} {:>9} {:>9} {:>8} {:>11} {:>11}"
HEADS = ("target", "cases", "accepted", "refused", "cases/s", "growth MiB", "bytes/case")


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    logs.configure(Settings(log_level="error", log_format="text"))
    FOLDER.mkdir(parents=True, exist_ok=True)
    names = arguments.target or [*TARGETS, openapi.NAME]
    if arguments.replay:
        replay(TARGETS[names[0]], arguments.replay)
        return
    outcomes = run_all(names, arguments)
    write_results(arguments, outcomes)
    problems = [problem for outcome in outcomes for problem in problems_of(outcome)]
    sys.exit("\n".join(problems) or 0)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [*TARGETS, openapi.NAME]
    parser.add_argument("--cases", type=int, default=1_000_000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", action="append", choices=names, help="only this; repeatable")
    parser.add_argument("--minutes", type=float, default=120.0, help="the longest time for all")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="read this case of --target")
    parser.add_argument(
        "--into", type=Path, default=FOLDER / "results.json", metavar="FILE", help="keep the counts"
    )
    arguments = parser.parse_args(words)
    if arguments.replay and arguments.target not in [[name] for name in TARGETS]:
        parser.error(f"--replay needs one --target of {', '.join(TARGETS)}")
    return arguments


def replay(target: Target, file: Path) -> None:
    """Read a case, and let its error through."""
    with tempfile.TemporaryDirectory() as folder, target.open(Path(folder)) as read:
        try:
            read(file.read_bytes())
        except target.refusals as error:
            print(f"refused: {error}")
        else:
            print("accepted")


def shares(names: Sequence[str], cases: int) -> dict[str, int]:
    """Divide the cases among the targets, by their weights."""
    weights = {name: TARGETS[name].weight for name in names if name in TARGETS}
    requests = cases // OPENAPI_SHARE if weights else cases
    divided = {name: cases * weight // sum(weights.values()) for name, weight in weights.items()}
    return divided | ({openapi.NAME: requests} if openapi.NAME in names else {})


def run_all(names: Sequence[str], arguments: argparse.Namespace) -> list[Outcome]:
    """Run the targets in turn, and print a line for each. Each gets an equal part of the time that
    is left.
    """
    begin_s, outcomes = time.monotonic(), list[Outcome]()
    print(COLUMNS.format(*HEADS), flush=True)
    divided = shares(names, arguments.cases)
    for number, (name, cases) in enumerate(divided.items()):
        now_s = time.monotonic()
        left_s = arguments.minutes * 60 - (now_s - begin_s)
        end_s = now_s + left_s / (len(divided) - number)
        if name == openapi.NAME:
            outcome = openapi.run(arguments.seed, cases, FOLDER, end_s)
        else:
            outcome = run(TARGETS[name], arguments.seed, cases, FOLDER, end_s)
        outcomes.append(outcome)
        cells = ("-" if cell is None else cell for cell in row_of(outcome).values())
        print(COLUMNS.format(*cells), flush=True)
    print(f"{sum(outcome.cases for outcome in outcomes):,} cases")
    return outcomes


def row_of(outcome: Outcome) -> dict[str, str | int | float | None]:
    growth = outcome.growth_bytes
    return {
        "target": outcome.target,
        "cases": outcome.cases,
        "accepted": outcome.accepted,
        "refused": outcome.refused,
        "cases_per_s": round(outcome.cases / outcome.seconds),
        "peak_growth_mib": round(outcome.peak_growth_bytes / 2**20, 2),
        "growth_bytes_per_case": None if growth is None else round(growth, 1),
    }


def problems_of(outcome: Outcome) -> list[str]:
    found = [
        f"{outcome.target}: {problem}\n  {_again(outcome.target, file)}"
        for problem, file in outcome.failures.items()
    ]
    if outcome.leaks:
        found.append(
            f"{outcome.target} keeps {outcome.growth_bytes:.0f} bytes of each case, expected at"
            f" most {MAX_GROWTH_BYTES}"
        )
    return found


def _again(target: str, file: Path) -> str:
    """How to repeat a failure."""
    if target == openapi.NAME:
        return f"{file} holds the request"
    return f"make fuzz FUZZ='--target {target} --replay {file}'"


def write_results(arguments: argparse.Namespace, outcomes: Sequence[Outcome]) -> None:
    """Replace the rows of the targets that ran, and keep those of the others."""
    rows = {}
    if arguments.into.exists():
        rows = {row["target"]: row for row in json.loads(arguments.into.read_text())["rows"]}
    for outcome in outcomes:
        row = {"failures": len(outcome.failures), "seed": arguments.seed}
        rows[outcome.target] = row_of(outcome) | row
    document = {
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "cases": sum(row["cases"] for row in rows.values()),
        "rows": [rows[name] for name in (*TARGETS, openapi.NAME) if name in rows],
        "environment": environment().model_dump(),
    }
    arguments.into.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
