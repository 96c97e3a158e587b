"""Markdown from results: the templates, and the filters that write numbers into them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.common import RESULTS, ROOT, text_of
from benchmarks.pages import accuracy, gpu_model_rows, tensorrt_rows
from benchmarks.pages.torch_comparison import comparisons
from benchmarks.run_all import NAMES
from benchmarks.serving.figures import STAGES

GPU_TESTS = ROOT / "tests" / "gpu" / "results"
TEMPLATES = Path(__file__).parent / "templates"


def load_results(folder: Path = RESULTS, gpu_tests: Path = GPU_TESTS) -> dict[str, Any]:
    """Every result by the name of its file. `gpu_tests` are the parts of `make test-gpu`."""
    return {**_documents(folder), "gpu_tests": list(_documents(gpu_tests).values())}


def _documents(folder: Path) -> dict[str, Any]:
    files = sorted(folder.glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def render(template: str, results: Mapping[str, Any]) -> str:
    """Fill in a template; UndefinedError for a result, or a field of one, that is missing."""
    return _environment().get_template(template).render(results=results)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        cell=cell,
        interval=interval,
        megabytes=megabytes,
        ms=ms,
        number=number,
        packages=packages,
        row=table_row,
        spread=spread,
        text=text_of,
        words=words,
    )
    environment.globals.update(
        accuracy=accuracy,
        comparisons=comparisons,
        gpu=gpu_model_rows,
        names=NAMES,
        stages=stages,
        tensorrt=tensorrt_rows,
    )
    return environment


# -- filters -----------------------------------------------------------------


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def ms(value: float | None) -> str:
    """Three decimals of what takes less than 10 ms, else two."""
    return number(value, ".2f" if value is not None and value >= 10 else ".3f")


def megabytes(value: float | None) -> str:
    return number(value / 1e6 if value else None, ".1f")


def interval(values: Sequence[float | None] | None, form: str) -> str:
    """`1.01 (1.00 to 1.02)` of an estimate and the bounds of its interval."""
    if values is None or None in values:
        return "-"
    value, low, high = (number(each, form) for each in values)
    return f"{value} ({low} to {high})"


def spread(values: Sequence[float]) -> str:
    """The mean, and the smallest and the largest of several values."""
    mean = number(sum(values) / len(values), ".2g")
    return f"{mean} ({min(values):.2g} to {max(values):.2g})" if len(values) > 1 else mean


def cell(text: str) -> str:
    """The text in one line, without ending the cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def table_row(cells: Iterable[str]) -> str:
    """The cells of one row of a table, in one line."""
    return f"| {' | '.join(cells)} |"


def words(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def packages(host: Mapping[str, Any], *names: str) -> str:
    """Names and versions of those packages that the host has."""
    versions = host["packages"]
    return ", ".join(f"{name} {versions[name]}" for name in names if name in versions)


# -- values ------------------------------------------------------------------


def stages(row: Mapping[str, Any], suffix: str) -> dict[str, float]:
    """Milliseconds of each stage of a server; empty if they are not all known."""
    keys = {stage: f"{stage}{suffix}" for stage in STAGES}
    if any(row.get(key) is None for key in keys.values()):
        return {}
    return {stage: row[key] for stage, key in keys.items()}
