"""Write docs/benchmarks.md, and the tables and figures of accuracy.md, measurement.md, deploy.md
and the README, from benchmarks/results/*.json.

No figure there is typed by hand, and a test keeps pages and results in step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, takes_no_arguments, text_of
from benchmarks.pages.accuracy_tables import (
    calibration_drawing,
    calibration_section,
    few_bits_section,
    int8_section,
    result,
)
from benchmarks.pages.figures import Drawing
from benchmarks.pages.gpu_drawings import curve_drawing, models_drawings
from benchmarks.pages.image_tables import images_section
from benchmarks.pages.render import load_results, render
from benchmarks.pages.serving_tables import (
    document_of,
    perf_analyzer_section,
    serving_gpu_section,
    serving_section,
    soak_section,
)
from benchmarks.pages.tensorrt_rows import MODELS
from benchmarks.pages.verdict_tables import demo_section, verdicts_section
from benchmarks.run_all import NAMES

PAGE = ROOT / "docs" / "benchmarks.md"
ACCURACY_PAGE = ROOT / "docs" / "accuracy.md"
MEASUREMENT_PAGE = ROOT / "docs" / "measurement.md"
DEPLOY_PAGE = ROOT / "docs" / "deploy.md"
README = ROOT / "README.md"
BEGIN, END = (
    "<!-- {part}: from here on written by python -m benchmarks pages -->\n",
    "<!-- {part}: written by python -m benchmarks pages up to here -->\n",
)
HEAD = """# Benchmarks

`make bench` measures what a CPU can show. It runs these benchmarks, one after another:
{names}.
The figures of `calibration` and `few_bits` are in [accuracy.md](accuracy.md), those of
`synthetic_clock` and `pitfalls` in [measurement.md](measurement.md). Each runs alone too:
`.venv/bin/python -m benchmarks NAME`. `benchmarks/README.md` lists them all, with the question that
each answers and the minutes it takes.

`make bench` does not run `make soak`, `perf_analyzer` and `image_size`, nor what needs a GPU:
`peak --gpu`, `serving --backend tensorrt`, `make bench-gpu`, `gpu_models` and, on a GPU host,
`verdicts`.

This page is written by `python -m benchmarks pages` from the files in `benchmarks/results/`, which
hold the environment of each run. Figures are medians; ratios come from one interleaved run
([measurement.md](measurement.md) says how). Intervals of before 2026-11-24 are by the estimator of
that time, Student's over all processes. Other machines give other figures: look at the CPU's flags
first.
"""
SECTIONS = {
    "resnet50": (
        """## ResNet-50 against PyTorch eager
All candidates of `configs/resnet50.yaml` (random weights: for speed only). `ratio` is the eager
median over this median, with its 95 % interval. bf16 by OpenVINO loses to fp32 on a host where AMX
cannot be used, and is measured so that nobody has to guess. What binds a row, and the next step
that goes with it: [what binds a row](measurement.md#what-binds-a-row)."""
    ),
    "session_overhead": (
        """## Our Session against calling the library directly
Both in one process, in turn, on the same engine: from numpy arrays to numpy arrays.
On a small model the difference counts, on a large one the ratio."""
    ),
    "same_engine": (
        """## The same engine entered twice
ONNX Runtime fp32, batch 1, one file, entered twice. The interval should hold 1: a right one of 95 %
misses it once in twenty runs. The wider it is, the larger must a difference be to be told on that
host."""
    ),
    "compile_time": (
        """## The demo's compile
The whole process of `crucible compile configs/digits.yaml`: export, calibration, every candidate
that this CPU runs, measuring. Then again with everything in the store."""
    ),
    "peak": (
        """## What this machine reaches
The fastest matrix product per precision (of two libraries, three sizes) and the fastest copy, with
all cores: what rows are seen against."""
    ),
    "peak_gpu": (
        """## What the GPU reaches
The same on a GPU (`python -m benchmarks peak --gpu` there), by PyTorch's own products: cuBLAS.
`known` is the rate at the highest clock, which power does not allow for long."""
    ),
    "calibration_memory": (
        """## Memory of calibration
Peak memory of a process that calibrates ResNet-50 on generated 224x224 images. It must not grow
with the number of samples."""
    ),
    "plain_attention": (
        """## Plain attention on the CPU
Engines of the graph as it was exported, and with attention written plainly
(`simplify.plain_attention`, the default), in one race: MiniLM with its real weights and dynamic
shapes, as torch.export and as TorchScript exports it, BERT-base, ViT-B/16 and Swin-T with random
weights. `ratio` is how many times as fast: the mean over pairs of processes, with its 95 %
interval. TorchScript's masks of -inf lose a guard over all scores and get a factor behind each
product, which is the larger of the two where texts have fewer tokens than a head has channels. On a
GPU: `surgery` in the rows `encoder_…`, `vit_…`, `swin_b8` and `flexibility_encoder`
[below](#compared-with-plain-tensorrt-and-with-pytorch-h200)."""
    ),
    "service_memory": (
        """## Memory of the service
`crucible serve`, and all processes of a job together, pages that they share counted once. The
models are layers of matrix products, tried on every backend of this host, without data."""
    ),
    "json_beside_binary": (
        """## Long JSON beside short requests
Times of a binary request of 1 KB on one connection: alone, and while four clients send 150,528
numbers as JSON, each as fast as it is answered. The server is the real one, its models only copy.
The target holds for the median round."""
    ),
}
COMMANDS = {"peak_gpu": "peak --gpu"}
"""Benchmarks that do not have the name of their result."""


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
    readme = _filled(
        README,
        {
            "demo": demo_section(document_of("verdicts")),
            "fastest": [
                *render("torch_comparison.md.j2", load_results()).splitlines(),
                "",
                "[Every engine, command and note](docs/benchmarks.md).",
            ],
        },
    )
    own = {
        ACCURACY_PAGE: accuracy_page(),
        MEASUREMENT_PAGE: measurement_page(),
        DEPLOY_PAGE: deploy_page(),
    }
    return {PAGE: page(), **own, README: readme}


def drawings() -> tuple[Drawing, ...]:
    """All figures of the pages."""
    gpu = load_results()["gpu_models"]
    return (calibration_drawing(result("calibration")), *models_drawings(gpu), curve_drawing(gpu))


def page() -> str:
    """The whole page."""
    parts = [HEAD.format(names=", ".join(f"`{name}`" for name in NAMES))]
    parts += verdicts_section(document_of("verdicts"), document_of("verdicts_gpu"))
    for name, text in SECTIONS.items():
        result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        command = [
            f"Repeat it with `.venv/bin/python -m benchmarks {COMMANDS.get(name, name)}`.",
            "",
        ]
        parts += [
            text,
            *command,
            *_table(result["rows"]),
            "",
            *_targets(result["targets"]),
            "",
            _environment(result),
            "",
        ]
    parts += (
        serving_section(document_of("serving"))
        + serving_gpu_section(*map(document_of, ("serving_gpu", "serving_gpu_overlap")))
        + soak_section(document_of("soak"))
    )
    parts += perf_analyzer_section(document_of("perf_analyzer"))
    results = load_results()
    last = render("tensorrt.md.j2", results) + render("gpu_models.md.j2", results)
    return "\n".join([*parts, last])


def accuracy_page() -> str:
    timed = {
        "resnet50": result("resnet50"),
        "gpu_models": result("gpu_models"),
        **{f"tensorrt_{model}": result(f"tensorrt_{model}") for model in MODELS},
    }
    parts = {
        "calibration": calibration_section(result("calibration")),
        "int8": int8_section({name: each for name, each in timed.items() if each}),
        "few bits": few_bits_section(result("few_bits")),
        "gpu": render("gpu_accuracy.md.j2", load_results()).splitlines(),
    }
    return _filled(ACCURACY_PAGE, parts)


def deploy_page() -> str:
    return _filled(DEPLOY_PAGE, {"images": images_section(document_of("image_size"))})


def measurement_page() -> str:
    """docs/measurement.md, likewise."""
    clock, careless = result("synthetic_clock"), result("pitfalls")
    parts = {
        "same engine": same_engine_lines(result("same_engine")),
        "synthetic clock": [*_table(clock["rows"]), "", *_targets(clock["targets"])],
        "races": _table(clock["races"]),
        "pitfalls": [
            *_table(careless["rows"]),
            "",
            *_targets(careless["targets"]),
            "",
            _environment(careless),
            _load(careless),
        ],
        "launch queue": render("launch_queue.md.j2", load_results()).splitlines(),
    }
    return _filled(MEASUREMENT_PAGE, parts)


def same_engine_lines(document: Mapping[str, Any]) -> list[str]:
    """How far processes of one file lie apart, and what the interval makes of it."""
    rows, host = document["rows"], document["environment"]
    told = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        apart, wide = (
            [row["processes_differ_%"] for row in mine],
            [100 * (row["high"] - row["low"]) for row in mine],
        )
        told.append(
            f"on {model} by {min(apart):.2g} to {max(apart):.2g} % (standard deviation), with"
            f" intervals {min(wide):.2g} to {max(wide):.2g} % wide"
        )
    held = sum(row["holds_1"] for row in rows)
    return [
        f"Processes of one file differed {'; '.join(told)}.",
        f"{held} of {len(rows)} intervals held 1 (`.venv/bin/python -m benchmarks same_engine`).",
        f"{document['created'][:10]}, {host['cpu']}, {host['cores']} cores. {_load(document)}",
    ]


def _load(document: Mapping[str, Any]) -> str:
    return f"The load of the host was {document['environment']['load_1min']:.1f} at the end."


def _filled(page: Path, parts: Mapping[str, list[str]]) -> str:
    """The page as it is, with these lines between the marks of each part."""
    text = page.read_text(encoding="utf-8")
    for part, lines in parts.items():
        begin, end = BEGIN.format(part=part), END.format(part=part)
        before, _, rest = text.partition(begin)
        text = (
            before
            + begin
            + "".join(f"{line}\n" for line in ["", *lines, ""] * bool(lines))
            + end
            + rest.partition(end)[2]
        )
    return text


def _table(rows: list[Mapping[str, Any]]) -> list[str]:
    lines = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    return lines + [f"| {' | '.join(text_of(cell) for cell in row.values())} |" for row in rows]


def _targets(targets: Mapping[str, bool]) -> list[str]:
    return [f"- {'met' if met else '**missed**'}: {target}" for target, met in targets.items()]


def _environment(result: Mapping[str, Any]) -> str:
    host = result["environment"]
    packages = ", ".join(
        f"{name} {version}"
        for name, version in host["packages"].items()
        if name in ("torch", "onnxruntime", "openvino", "nncf")
    )
    return (
        f"{result['created'][:10]}, {host['cpu']}, {host['cores']} cores, flags"
        f" {' '.join(host['cpu_flags'])}; Python {host['python']}, {packages}."
    )
