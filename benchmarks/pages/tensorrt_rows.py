"""What pages compute from results/tensorrt_*.json and from the results of `make test-gpu`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MODELS = {
    "digits": "The CNN of `configs/digits.yaml`",
    "minilm": "The sentence encoder of `configs/minilm.yaml`, with mask and padded lengths",
    "resnet50": "ResNet-50 of `configs/resnet50.yaml`, random weights, for speed only",
}
DURATION = "benchmark.duration_s="
BUILD_SETTINGS = ("tensorrt.", "profiles=")

Document = Mapping[str, Any]
Row = Mapping[str, Any]


def documents(results: Mapping[str, Document]) -> dict[str, Document]:
    """Results of `tensorrt_compile` by model, in the order of MODELS."""
    names = {model: f"tensorrt_{model}" for model in MODELS}
    return {model: results[name] for model, name in names.items() if name in results}


def first_rows(rows: Iterable[Row]) -> list[Row]:
    """The first row of each candidate: the baseline is measured in every part, and shown once."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row["candidate"], row)
    return list(first.values())


def untimed(document: Document) -> list[Row]:
    """Candidates that were built and checked, and not timed."""
    rows = document["rows"]
    return [row for row in rows if row["state"] != "baseline" and not row.get("latency")]


def any_shared(document: Document, rows: Iterable[Row]) -> bool:
    """True if other work ran on the GPU of one of these rows."""
    return any(document["parts"].get(row["part"], {}).get("shared") for row in rows)


def device(document: Document) -> str:
    """The GPU that ran the parts."""
    part = next(part for part in document["parts"].values() if "target" in part)
    return str(part["target"]["device"]).removeprefix("NVIDIA ")


def commands_by_place(document: Document, rows: Iterable[Row]) -> dict[str, list[str]]:
    """The commands that repeat the parts of these rows, by settings and host of the parts."""
    commands: dict[str, list[str]] = {}
    for name in dict.fromkeys(row["part"] for row in rows):
        part = document["parts"][name]
        if "target" in part:
            commands.setdefault(_place(part), []).append(_command(document, name))
    return commands


def _command(document: Document, name: str) -> str:
    part, model = document["parts"][name], document["benchmark"].removeprefix("tensorrt_")
    words = [f"{model}/{name}"]
    for override in part.get("overrides", ()):
        if override.startswith(DURATION):
            words += ["--seconds", override.removeprefix(DURATION)]
    if part.get("shared"):
        words.append("--shared")
    return f'make bench-gpu PARTS="{" ".join(words)}"'


def _place(part: Document) -> str:
    """How engines were built that are not the plan's own, and where."""
    overrides = part.get("overrides", ())
    settings = [f"`{each}`" for each in overrides if each.startswith(BUILD_SETTINGS)]
    host, target = part["environment"], part["target"]
    packages = [
        f"{name} {host['packages'][name]}"
        for name in ("torch", "onnxruntime", "nvidia-modelopt")
        if name in host["packages"]
    ]
    return (
        f"{' with ' if settings else ''}{', '.join(settings)}: {part['created'][:10]},"
        f" {target['device']}, driver {target['driver']}, TensorRT {target['version']};"
        f" {host['cpu']}, {host['cores']} cores, Python {host['python']}, {', '.join(packages)}."
    )


# -- make test-gpu -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TestsSummary:
    """What all parts of `make test-gpu` came to."""

    gpu: str
    tensorrt: str
    parts: int
    revisions: Counter[str]  # parts by the revision of the code
    outcomes: list[tuple[str, int]]  # the most frequent first
    created: str
    seconds: float
    repaired: int  # tests that passed after they had failed in an earlier part
    failed: list[str]
    reasons: list[str]  # of tests that were skipped in every part


def summary_of_tests(parts: Sequence[Document]) -> TestsSummary:
    """Of a test that ran in several parts, the last run counts."""
    by_test = outcomes_by_test(parts)
    last = {test: last_of(outcomes) for test, outcomes in by_test.items()}
    repaired = [test for test, each in by_test.items() if "failed" in each]
    skipped = [test for part in parts for test in part["tests"] if last[test["test"]] == "skipped"]
    revisions = (part.get("revision", "")[:7] for part in _in_order(parts))
    return TestsSummary(
        gpu=" and ".join(dict.fromkeys(part["gpus"][0]["name"] for part in _in_order(parts))),
        tensorrt=parts[0]["tensorrt"],
        parts=len(parts),
        revisions=Counter(filter(None, revisions)),
        outcomes=Counter(last.values()).most_common(),
        created=parts[0]["created"][:10],
        seconds=sum(part["seconds"] for part in parts),
        repaired=sum(last[test] == "passed" for test in repaired),
        failed=[
            test.partition("::")[2]
            for test, outcome in last.items()
            if outcome in ("failed", "error")
        ],
        reasons=list(filter(None, dict.fromkeys(test.get("reason", "") for test in skipped))),
    )


def _in_order(parts: Iterable[Document]) -> list[Document]:
    return sorted(parts, key=lambda part: str(part["created"]))


def outcomes_by_test(parts: Iterable[Document]) -> dict[str, list[str]]:
    """How each test ended, the last run last."""
    runs: dict[str, list[str]] = {}
    for part in _in_order(parts):
        for each in part["tests"]:
            runs.setdefault(each["test"], []).append(each["outcome"])
    return runs


def last_of(outcomes: list[str]) -> str:
    """How the last run ended that was no skip."""
    return next((outcome for outcome in reversed(outcomes) if outcome != "skipped"), "skipped")
