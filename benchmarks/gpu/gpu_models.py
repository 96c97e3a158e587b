"""The fastest engine on this host's GPU beside plain TensorRT and PyTorch: any row of the table by
one command.

    python -m benchmarks gpu_models [ROW ...] [--into DIR] [--seconds S] [--keep FOLDER]
                                    [--ways fp16,int8] [--no-bare] [--no-peers]
                                    [--only WORD,WORD] [--set KEY=VALUE] [--note TEXT]
                                    [--modes MODE] [--prepare] [--build] [--list]

A row is one model at one shape: ours in each precision, the same graph built and run by TensorRT's
plain API, and PyTorch, all in one interleaved run, each in a process of its own. After each row
DIR/gpu_models.json is written anew, with what earlier commands found in other rows; a row that
fails says so there and does not stop the next. Each row keeps the environment of its run and the
command that repeats it. With `--ways` it is another row, `ROW: WAY, WAY`, beside the whole one;
such a heading is also taken in the place of ROW. CRUCIBLE_HOME keeps graphs, engines, the timing
cache and Inductor's cache; `--keep` packs the last two into FOLDER after each row and unpacks them
before the first, so that they can go to another machine. `--prepare` only makes the graphs of the
rows, several at once: that needs no GPU for itself, and is most of what the CPU has to do.
`--build` makes the engines and lets torch.compile tune, and measures nothing.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, argument_parser
from benchmarks.gpu.async_curve import async_curve
from benchmarks.gpu.host import restore, store
from benchmarks.gpu.measure_row import Options, measure_row, prepare_row
from benchmarks.gpu.parts import FLEXIBILITY, flexibility, overlap, prepare_flexibility, throughput
from benchmarks.gpu.rows import (
    COMMAND,
    ROWS,
    WAYS,
    Choice,
    choice_from_heading,
    row_named,
    words_of,
)
from benchmarks.gpu.tactics import tactics
from benchmarks.gpu.torch_peers import COMPILE_MODES, cache_folder
from pipeline.backends.tensorrt import backend as tensorrt_
from pipeline.core.artifacts import Target
from pipeline.errors import BackendUnavailable, CrucibleError
from pipeline.host.environment import environment, usable_cores
from pipeline.measurement.clock import monotonic
from pipeline.plan.files import home

NAME = "gpu_models"
AT_ONCE = 6  # rows prepared side by side: an export takes a few GB, and its share of the cores

Part = Callable[[Options], dict[str, Any]]
PARTS: Mapping[str, tuple[Part, float]] = {
    **{row.name: (partial(measure_row, row), row.minutes) for row in ROWS},
    **{
        f"resnet50_throughput_b{batch}": (partial(throughput, batch=batch), 12)
        for batch in (256, 512, 1024, 2048, 128, 64)
    },
    "resnet50_throughput_uint8_b256": (partial(throughput, batch=256, pixels="uint8"), 12),
    "resnet50_throughput_b256_level5": (partial(throughput, batch=256, level=5), 15),
    "async_curve": (lambda options: async_curve(), 1),
    "tactics": (tactics, 16),
    "overlap": (overlap, 4),
    **{f"flexibility_{model}": (partial(flexibility, model), 10) for model in FLEXIBILITY},
}
"""Every row and part, and the minutes that it takes with cold caches (an estimate)."""
PREPARED: Mapping[str, Part] = {
    **{row.name: partial(prepare_row, row) for row in ROWS},
    **{f"flexibility_{model}": partial(prepare_flexibility, model) for model in FLEXIBILITY},
}
"""What makes the graphs of a row or part without a GPU."""


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    if arguments.list:
        print(
            "\n".join(
                f"{name:32} about {minutes:g} min with cold caches"
                for name, (_, minutes) in PARTS.items()
            )
        )
        return
    choices = arguments.rows or [Choice(name) for name in PARTS]
    chosen = {
        name: getattr(arguments, name)
        for name in ("seconds", "ways", "peers", "bare", "only", "modes", "build_only")
    }
    options = Options(overrides=tuple(arguments.set), **chosen)
    try:
        target = tensorrt_.probe()
    except BackendUnavailable as error:
        sys.exit(str(error))
    cache_folder(home())
    if arguments.keep:
        print(
            f"restored: {', '.join(restore(home(), arguments.keep)) or 'nothing'}", file=sys.stderr
        )
    if arguments.prepare:
        sys.exit(prepare(choices, options))
    document: dict[str, Any] = {"rows": {}}
    if arguments.build_only:
        sys.exit(
            build([choice for choice in choices if row_named(choice.name)], options, arguments.keep)
        )
    headings = []
    for choice in choices:
        print(f"== {choice.heading}", flush=True)
        mine = options_for(choice, options)
        found = guarded(PARTS[choice.name][0], mine) | (
            {"note": arguments.note} if arguments.note else {}
        )
        headings.append(key_of(choice.name, mine))
        document = add_row(
            arguments.into / f"{NAME}.json",
            headings[-1],
            found | {"command": command_of(choice.name, mine)},
            target,
        )
        Console(width=170).print(table(choice.name, found))
        if arguments.keep:
            print(f"kept: {store(home(), arguments.keep)}", file=sys.stderr, flush=True)
    rows = {heading: document["rows"][heading] for heading in headings}
    print(json.dumps({key: summary(row) for key, row in rows.items()}))
    sys.exit(any("failed" in row for row in rows.values()))


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("gpu_models", __doc__)
    parser.add_argument(
        "rows",
        nargs="*",
        type=_row,
        metavar="ROW",
        help="or ROW: WAY, WAY [default: all]; --list prints them",
    )
    parser.add_argument(
        "--into", type=Path, default=RESULTS, metavar="DIR", help="where the results go"
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="of measuring, per engine")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="where timing cache and Inductor's cache come from and go to",
    )
    parser.add_argument(
        "--ways",
        type=_ways,
        default=(),
        metavar="WAY,WAY",
        help=f"of ours, instead of all of the row: {', '.join(WAYS)}",
    )
    parser.add_argument(
        "--only",
        type=words_of,
        default=(),
        metavar="WORD,WORD",
        help="of a part, only the variants whose names hold a word",
    )
    parser.add_argument(
        "--modes",
        type=_modes,
        default=COMPILE_MODES,
        metavar="MODE,MODE",
        help="of torch.compile: the first that ends in time",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the plan"
    )
    parser.add_argument(
        "--note", default="", metavar="TEXT", help="what a reader of these rows must know"
    )
    parser.add_argument("--no-bare", dest="bare", action="store_false", help="without bare builds")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="without PyTorch")
    parser.add_argument(
        "--prepare", action="store_true", help="only export, simplify and convert the rows"
    )
    parser.add_argument(
        "--build",
        dest="build_only",
        action="store_true",
        help="only build and compile the rows, for the store and the caches",
    )
    parser.add_argument("--list", action="store_true", help="print rows and parts, and end")
    return parser.parse_args(words)


def _row(text: str) -> Choice:
    choice = choice_from_heading(text)
    if choice.name not in PARTS:
        raise argparse.ArgumentTypeError(f"no row '{choice.name}'; --list prints them")
    if choice.names_ways:
        _ways(",".join(choice.words))
    return choice


def _ways(text: str) -> tuple[str, ...]:
    ways = words_of(text)
    if unknown := [way for way in ways if way not in WAYS]:
        raise argparse.ArgumentTypeError(f"no way '{unknown[0]}'; expected {', '.join(WAYS)}")
    return ways


def _modes(text: str) -> tuple[str, ...]:
    modes = words_of(text)
    if unknown := [mode for mode in modes if mode not in COMPILE_MODES]:
        raise argparse.ArgumentTypeError(
            f"no mode '{unknown[0]}'; expected {', '.join(COMPILE_MODES)}"
        )
    return modes or COMPILE_MODES


def options_for(choice: Choice, options: Options) -> Options:
    """The options of one row: the ways or variants in its heading count before those of the command
    line.
    """
    if not choice.words:
        return options
    if choice.names_ways:
        return replace(options, ways=choice.words)
    return replace(options, only=choice.words)


def prepare(choices: list[Choice], options: Options) -> int:
    """Graphs of the rows, in this order, several at once; how many failed."""
    os.environ.setdefault(
        "OMP_NUM_THREADS", str(max(1, usable_cores() // AT_ONCE))
    )  # for the children: each would take all cores
    wanted = [choice for choice in choices if choice.name in PREPARED]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = list(
            pool.map(
                lambda choice: guarded(PREPARED[choice.name], options_for(choice, options)), wanted
            )
        )
    for choice, found in zip(wanted, done, strict=True):
        print(f"{choice.heading}: {found.get('failed') or 'prepared'} ({found['seconds']:.0f} s)")
    return sum("failed" in found for found in done)


def build(choices: list[Choice], options: Options, keep: Path | None) -> int:
    """Engines and compiled code of the rows, kept for the command that measures them; how many rows
    failed.
    """
    failed = 0
    for choice in choices:
        found = guarded(PARTS[choice.name][0], options_for(choice, options))
        failures = {
            engine: entry["failed"]
            for engine, entry in found.get("entries", {}).items()
            if "failed" in entry
        }
        print(
            f"{choice.heading}: {found.get('failed') or 'built'} ({found['seconds']:.0f} s)"
            f" {failures or ''}",
            flush=True,
        )
        failed += "failed" in found
        if keep:
            print(f"kept: {store(home(), keep)}", file=sys.stderr, flush=True)
    return failed


def guarded(part: Part, options: Options) -> dict[str, Any]:
    """What the part found; under "failed" why it did not."""
    begin = monotonic()
    created = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    try:
        found = part(options)
    except CrucibleError as error:
        found = {"created": created, "failed": error.message}
    except Exception as error:  # noqa: BLE001  the edge of a row: the next must run
        traceback.print_exc()
        found = {"created": created, "failed": f"{type(error).__name__}: {error}"}
    return {"began": created, "created": created, **found, "seconds": round(monotonic() - begin, 1)}


# -- the document ------------------------------------------------------------


def key_of(name: str, options: Options) -> str:
    """A row of some of its ways, or a part of some variants, has a place of its own: it does not
    replace the whole one.
    """
    words = options.ways if Choice(name).names_ways else options.only
    return Choice(name, words).heading


def command_of(name: str, options: Options) -> str:
    """The command that measures this row again, for a shell in the checkout."""
    usual = Options()
    words = [key_of(name, options)]
    words += ["--seconds", f"{options.seconds:g}"] * (options.seconds != usual.seconds)
    words += ["--modes", ",".join(options.modes)] * (options.modes != usual.modes)
    words += ["--no-bare"] * (not options.bare) + ["--no-peers"] * (not options.peers)
    for override in options.overrides:
        words += ["--set", override]
    return shlex.join([*COMMAND, *words])


def add_row(file: Path, name: str, row: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Write the document with this row in the place of an earlier run of it. The environment is the
    row's: others were measured elsewhere.
    """
    old = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else {}
    here = {
        "target": target.model_dump(mode="json"),
        "environment": environment().model_dump(mode="json"),
    }
    rows = {**old, name: {**row, **here}}
    document = {
        "benchmark": NAME,
        "created": row["created"],
        "rows": {
            each: rows[each] for part in PARTS for each in rows if each.partition(":")[0] == part
        },
        "targets": {
            f"{each}: {goal['text']}": bool(goal["reached"])
            for each in rows
            for goal in rows[each].get("targets", ())
        },
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


def summary(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row on one line."""
    if "failed" in row:
        return {"failed": row["failed"]}
    return {
        goal["text"]: [goal["value"], goal["limit"], goal["reached"]]
        for goal in row.get("targets", ())
    }


SHOWN = (("device_median_ms", ".4f"), ("wall_median_ms", ".4f"), ("throughput_per_s", ",.0f"))


def table(name: str, row: Mapping[str, Any]) -> Table:
    """One row, for the eye."""
    shown = Table(
        "engine",
        "GPU ms",
        "wall ms",
        "rows/s",
        "cosine",
        "build s",
        "time by precision",
        title=f"{name} {row.get('failed', '')}",
    )
    for engine, entry in row.get("entries", {}).items():
        if not isinstance(entry, Mapping):
            continue
        cells = [_number(entry.get(key), form) for key, form in SHOWN]
        shares = ", ".join(
            f"{name} {share:.0%}"
            for name, share in ((entry.get("layers") or {}).get("time_share") or {}).items()
        )
        more = [_number(entry.get("cosine"), ".4f"), _number(entry.get("build_s"), ".1f")]
        shown.add_row(
            engine, *cells, *more, shares or str(entry.get("failed", entry.get("mode", "")))[:70]
        )
    for goal in row.get("targets", ()):
        state = {True: "reached", False: "MISSED", None: "not measured"}[goal["reached"]]
        shown.add_row(
            f"{state}: {goal['text']}",
            _number(goal["value"], ".3f"),
            goal["direction"],
            f"{goal['limit']:g}",
        )
    return shown


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
