"""The parts of docs/ that come from a GPU host: from results/tensorrt_*.json and
tests/gpu/results/*.json. Without these files they are empty.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT

TESTS = ROOT / "tests" / "gpu" / "results"
MODELS = {
    "digits": "The CNN of `configs/digits.yaml`",
    "minilm": "The sentence encoder of `configs/minilm.yaml`, with mask and padded lengths",
    "resnet50": "ResNet-50 of `configs/resnet50.yaml`, random weights, for speed only",
}
CHOICE = "choice"
DURATION = "benchmark.duration_s="

Document = Mapping[str, Any]
Row = Mapping[str, Any]


def documents(folder: Path = RESULTS) -> dict[str, Document]:
    """The results by model, in the order of MODELS."""
    files = {model: folder / f"tensorrt_{model}.json" for model in MODELS}
    return {
        model: json.loads(file.read_text(encoding="utf-8"))
        for model, file in files.items()
        if file.is_file()
    }


# -- docs/benchmarks.md ------------------------------------------------------


def speed_section(found: Mapping[str, Document], tests: Path = TESTS) -> list[str]:
    """Latency, build time and precision of every candidate on the GPU, as lines; none where there
    are no results.
    """
    if not found:
        return []
    lines = [f"## TensorRT on {_gpu(next(iter(found.values())))} GPUs", *_about(tests), ""]
    for model, document in found.items():
        lines += [f"### {MODELS[model]}", "", *_speed_tables(document)]
        if CHOICE in document["parts"]:
            lines += [*_choice(document), ""]
        lines += [
            f"- {'met' if met else '**missed**'}: {target}"
            for target, met in document["targets"].items()
        ]
        lines += [
            f"- **failed**: part `{name}`: {part['failed']}"
            for name, part in document["parts"].items()
            if "failed" in part
        ]
        lines += [""]
    return lines


def _speed_tables(document: Document) -> list[str]:
    """The candidates that were timed, then those that were only built and checked, each with how
    and where.
    """
    timed = [row for row in document["rows"] if row.get("latency")]
    untimed = [
        row for row in document["rows"] if not row.get("latency") and row["state"] != "baseline"
    ]
    lines = [*_speed_table(_once(timed)), "", *_places(document, timed), ""] if timed else []
    if untimed:
        shared = any(document["parts"].get(row["part"], {}).get("shared") for row in untimed)
        why = ": other work ran on that GPU meanwhile" if shared else ""
        lines += [
            f"Built and checked, and no times kept{why}.",
            "",
            *_built_table(_once(untimed)),
            "",
            *_places(document, untimed),
            "",
        ]
    return lines


def _places(document: Document, rows: Iterable[Row]) -> list[str]:
    """Commands, settings and environment of the parts that these rows come from, as lines of a
    list.
    """
    commands: dict[str, list[str]] = {}
    for name in dict.fromkeys(row["part"] for row in rows):
        part = document["parts"][name]
        if "target" in part:
            commands.setdefault(f"{_settings(part)}: {_host(part)}", []).append(
                _command(document, name)
            )
    return [f"- `{'`, `'.join(names)}`{place}" for place, names in commands.items()]


def _command(document: Document, name: str) -> str:
    """The command that repeats a part."""
    part, model = document["parts"][name], document["benchmark"].removeprefix("tensorrt_")
    seconds = next(
        (each.partition("=")[2] for each in part.get("overrides", ()) if each.startswith(DURATION)),
        "",
    )
    words = [f"{model}/{name}"]
    words += ["--seconds", seconds] if seconds else []
    words += ["--shared"] if part.get("shared") else []
    return f'make bench-gpu PARTS="{" ".join(words)}"'


def _settings(part: Document) -> str:
    """How engines were built that are not the plan's own."""
    changed = [
        each for each in part.get("overrides", ()) if each.startswith(("tensorrt.", "profiles="))
    ]
    return f" with `{'`, `'.join(changed)}`" if changed else ""


def _about(tests: Path) -> list[str]:
    lines = [
        (
            "`make bench` does not run this: `make bench-gpu` does, on a host with a GPU"
            " (`python -m benchmarks tensorrt_compile`)."
        ),
        (
            "Times are medians in ms, from host arrays to host arrays and, after the slash, of the"
            " GPU's work alone;"
        ),
        (
            "`ratio` is the median of PyTorch eager in fp32 on the same GPU over this one."
            " PyTorch's faster modes are in the next section."
        ),
        (
            "Build times are those of one run, in this order, with one timing cache: what an"
            " earlier engine has timed, a later one need not."
        ),
        (
            "`time by precision` is the share of an engine's time that it really ran in each;"
            " layers that only move or convert data count as `none`."
        ),
    ]
    return [
        *lines,
        *_tests(
            [json.loads(file.read_text(encoding="utf-8")) for file in sorted(tests.glob("*.json"))]
        ),
    ]


def _tests(parts: list[Document]) -> list[str]:
    """What all parts of `make test-gpu` came to; of a test that ran in several, the last run
    counts.
    """
    if not parts:
        return []
    runs = outcomes_by_test(parts)
    last = {test: last_of(outcomes) for test, outcomes in runs.items()}
    counts = ", ".join(
        f"{count} {outcome}" for outcome, count in Counter(last.values()).most_common()
    )
    mended = sum("failed" in outcomes and last[test] == "passed" for test, outcomes in runs.items())
    first = parts[0]
    again = f" {mended} of those that passed had failed in an earlier part." if mended else ""
    failed = "".join(
        f" Failed: `{test.partition('::')[2]}`."
        for test, outcome in last.items()
        if outcome in ("failed", "error")
    )
    return [
        "",
        (
            f"`make test-gpu` on {first['gpus'][0]['name']} with TensorRT"
            f" {first['tensorrt']}{_in_parts(parts)}: {counts} ({first['created'][:10]};"
            f" {sum(part['seconds'] for part in parts) / 60:.0f} min in"
            f" all).{again}{failed}{_why_skipped(parts, last)}"
        ),
    ]


def _in_parts(parts: list[Document]) -> str:
    """How many parts, and of which revisions of the code."""
    if len(parts) == 1:
        return ""
    revisions = Counter(
        part.get("revision", "")[:7] for part in sorted(parts, key=lambda part: part["created"])
    )
    told = ", ".join(f"{count} at {revision}" for revision, count in revisions.items() if revision)
    return f" in {len(parts)} parts" + (f" ({told})" if told else "")


def _why_skipped(parts: list[Document], last: Mapping[str, str]) -> str:
    """The reasons of those tests that ran in no part."""
    skipped = [test for part in parts for test in part["tests"] if last[test["test"]] == "skipped"]
    reasons = dict.fromkeys(test.get("reason", "") for test in skipped)
    return f" Skipped: {'; '.join(filter(None, reasons))}." if any(reasons) else ""


def outcomes_by_test(parts: Iterable[Document]) -> dict[str, list[str]]:
    """How each test ended, the last run last."""
    runs: dict[str, list[str]] = {}
    for part in sorted(parts, key=lambda part: part["created"]):
        for each in part["tests"]:
            runs.setdefault(each["test"], []).append(each["outcome"])
    return runs


def last_of(outcomes: list[str]) -> str:
    """How the last run ended that was no skip."""
    return next((outcome for outcome in reversed(outcomes) if outcome != "skipped"), "skipped")


def _once(rows: Iterable[Row]) -> list[Row]:
    """The first row of each candidate: the baseline is measured in every part, and shown once."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row["candidate"], row)
    return list(first.values())


def _speed_table(rows: list[Row]) -> list[str]:
    sizes = [at["sizes"] for at in next((row["latency"] for row in rows if row.get("latency")), [])]
    head = [
        "candidate",
        "state",
        *(title for size in sizes for title in (f"ms at {_words(size)}", "ratio")),
        "build s",
        "engine MB",
        "time by precision",
    ]
    return _table(
        head,
        [[row["candidate"], row["state"], *_times(row, len(sizes)), *_engine(row)] for row in rows],
    )


def _times(row: Row, sizes: int) -> list[str]:
    cells = []
    for at in row.get("latency", ()):
        steady = "" if at["stable"] else " ~"
        cells += [
            f"{_ms(at['end_to_end_ms'])} / {_ms(at['compute_ms'])}{steady}",
            _interval(at["ratio"], at["ratio_low"], at["ratio_high"], ".2f"),
        ]
    return cells or ["-"] * (2 * sizes)


def _engine(row: Row) -> list[str]:
    seconds, size, shares = row.get("build_s"), row.get("engine_bytes"), row.get("time_share")
    moving = (
        f"; {row['moving_layers']} of {row['layers']} layers move data"
        if row.get("moving_layers")
        else ""
    )
    ran = (
        ", ".join(f"{name} {share:.0%}" for name, share in shares.items()) + moving
        if shares
        else ""
    )
    message = "; ".join(filter(None, (ran, row.get("reason", ""))))
    return [
        "-" if seconds is None else f"{seconds:.1f}",
        "-" if size is None else f"{size / 1e6:.1f}",
        _cell(message) or "-",
    ]


def _built_table(rows: list[Row]) -> list[str]:
    """As the speed table, without times."""
    return _table(
        ["candidate", "state", "engine MB", "time by precision"],
        [[row["candidate"], row["state"], *_engine(row)[1:]] for row in rows],
    )


def _choice(document: Document) -> list[str]:
    """What the plan as it is came to."""
    part, rows = (
        document["parts"][CHOICE],
        [row for row in document["rows"] if row["part"] == CHOICE],
    )
    tried = ", ".join(
        f"{row['candidate']} ({row['state']})" for row in rows if row["state"] != "baseline"
    )
    ended = (
        f"chose **{part['winner']}** ({part['verdict']})" if part.get("winner") else "chose none"
    )
    return [
        f"Left to itself (the plan names no candidates), Crucible tried {tried or 'nothing'} and"
        f" {ended}."
    ]


# -- docs/accuracy.md --------------------------------------------------------


def accuracy_section(found: Mapping[str, Document]) -> list[str]:
    """Metric and drop of every candidate on the GPU, as lines; none where there are no results with
    a metric.
    """
    judged = {
        model: _once(row for row in document["rows"] if row["state"] != "baseline")
        for model, document in found.items()
    }
    judged = {
        model: rows for model, rows in judged.items() if any(row.get("metric") for row in rows)
    }
    if not judged:
        return []
    lines = [
        "## What each precision costs on a GPU",
        (
            f"TensorRT on {_gpu(found[next(iter(judged))])} GPUs, on the selection sets, which had"
            " no part in calibration."
        ),
        (
            "The reference is the PyTorch model in fp32 without TF32. Repeat it with `make"
            " bench-gpu`, then `.venv/bin/python -m benchmarks pages`."
        ),
    ]
    for model, rows in judged.items():
        document = found[model]
        limit = next(row for row in rows if row.get("metric"))
        lines += [
            "",
            (
                f"{MODELS[model]}: {limit['metric']} of the reference {limit['reference']:.4f}, on"
                f" {limit['samples']} samples."
            ),
            "",
        ]
        lines += _table(
            ["candidate", limit["metric"], "drop (95 %)", "smallest cosine", "state"],
            [_judged(row) for row in rows],
        )
        lines += ["", *_places(document, rows)]
    return lines


def _judged(row: Row) -> list[str]:
    if row.get("metric") is None:
        return [row["candidate"], "-", "-", "-", _cell(f"{row['state']}: {row.get('reason', '')}")]
    drop = _interval(row["drop"], row["drop_low"], row["drop_high"], "+.4f")
    return [
        row["candidate"],
        f"{row['score']:.4f}",
        drop,
        f"{row['cosine']:.5f}",
        _cell(": ".join(filter(None, (row["state"], row["reason"])))),
    ]


# -- cells -------------------------------------------------------------------


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.2f}"


def _interval(value: float | None, low: float | None, high: float | None, form: str) -> str:
    return (
        "-"
        if value is None or low is None or high is None
        else f"{value:{form}} ({low:{form}} to {high:{form}})"
    )


def _words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items()) or "its one shape"


def _gpu(document: Document) -> str:
    part = next(part for part in document["parts"].values() if "target" in part)
    return str(part["target"]["device"]).removeprefix("NVIDIA ")


def _host(part: Document) -> str:
    host, target = part["environment"], part["target"]
    packages = ", ".join(
        f"{name} {host['packages'][name]}"
        for name in ("torch", "onnxruntime", "nvidia-modelopt")
        if name in host["packages"]
    )
    return (
        f"{part['created'][:10]}, {target['device']}, driver {target['driver']}, TensorRT"
        f" {target['version']}; {host['cpu']}, {host['cores']} cores, Python {host['python']},"
        f" {packages}."
    )
