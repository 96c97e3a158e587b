"""Write the pages and figures of docs/benchmarks, and the table of the README, from
benchmarks/results/*.json.

No figure there is typed by hand, and a test keeps pages and results in step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import ROOT, takes_no_arguments
from benchmarks.pages.accuracy import calibration_drawing
from benchmarks.pages.figures import FOLDER, Drawing
from benchmarks.pages.gpu_drawings import attention_drawing, curve_drawing, models_drawings
from benchmarks.pages.overview_drawings import serving_drawing, speedup_drawing
from benchmarks.pages.render import load_results, render

README = ROOT / "README.md"
PAGES = (
    "index",
    "gpu",
    "gpu-limits",
    "tensorrt",
    "cpu",
    "serving",
    "reliability",
    "accuracy",
    "measuring",
)
"""Pages in the folder of the figures. Each has a template of its name."""

PART = re.compile(
    r"^<!-- (?P<name>[^:\n]+): from here on written .*?"
    r"^<!-- (?P=name): written .*? up to here -->\n",
    re.DOTALL | re.MULTILINE,
)


def main(words: Sequence[str]) -> None:
    takes_no_arguments("pages", __doc__, words)
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
        print(f"wrote {file.relative_to(ROOT)}")
    for drawing in drawings():
        if not drawing.is_current():
            print(f"drew {drawing.write().relative_to(ROOT)}")


def pages() -> dict[Path, str]:
    """Every page that holds figures, as it is to be."""
    results = load_results()
    whole = {FOLDER / f"{name}.md": render(f"{name}.md.j2", results) for name in PAGES}
    readme = README.read_text(encoding="utf-8")
    return {**whole, README: with_parts_of(readme, render("readme.md.j2", results))}


def with_parts_of(page: str, rendered: str) -> str:
    """Replace each marked part of the page by the rendered one of that name."""
    parts = {part["name"]: part[0] for part in PART.finditer(rendered)}
    marks = {part["name"] for part in PART.finditer(page)}
    if marks != parts.keys():
        raise ValueError(f"the template has the parts {sorted(parts)}, the page {sorted(marks)}")
    return PART.sub(lambda part: parts[part["name"]], page)


def drawings() -> tuple[Drawing, ...]:
    """All figures of the pages."""
    results = load_results()
    gpu_models = results["gpu_models"]
    return (
        speedup_drawing(gpu_models),
        serving_drawing(results["serving"]),
        calibration_drawing(results["calibration"]),
        *models_drawings(gpu_models),
        curve_drawing(gpu_models),
        *map(attention_drawing, filter(None, [results.get("attention_lengths_gpu")])),
    )
