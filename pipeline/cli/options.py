"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PlanArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN|MODEL.onnx",
        help="YAML plan (keys: docs/reference/plan.md), or ONNX model for a plan of defaults.",
    ),
]
ResultArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Output folder of `crucible compile`.")
]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="A.B=VALUE",
        help="Set one key of the plan to a YAML value, e.g. benchmark.duration_s=10. Repeatable.",
        default_factory=list,
        show_default=False,
    ),
]
ProfileOption = Annotated[
    list[str],
    typer.Option(
        "--profile",
        metavar="DIM=MIN:OPT:MAX",
        help="Smallest, typical and largest size of a symbolic dimension, e.g. batch=1:8:64."
        " Repeatable.",
        default_factory=list,
        show_default=False,
    ),
]
PluginOption = Annotated[
    list[Path],
    typer.Option(
        "--plugin",
        metavar="LIB",
        help=(
            "Load this TensorRT plugin library first, like `tensorrt.plugins` in a plan. Needs"
            " --backend tensorrt. Repeatable."
        ),
        default_factory=list,
        show_default=False,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Folder for the reports and the engine; crucible-out/NAME if left out.",
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print only a JSON document to stdout, no tables and no progress."),
]
