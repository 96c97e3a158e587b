"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PlanArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN|MODEL.onnx",
        help="A YAML plan, or an ONNX model to compile with all defaults.",
    ),
]
ResultArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder that `crucible compile` wrote.")
]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="A.B=VALUE",
        help="Override one key of the plan; the value is YAML. Repeatable.",
        default_factory=list,
        show_default=False,
    ),
]
ProfileOption = Annotated[
    list[str],
    typer.Option(
        "--profile",
        metavar="DIM=MIN:OPT:MAX",
        help="Range of a symbolic dimension, e.g. batch=1:8:64. Repeatable.",
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
            "With --backend tensorrt: load this plugin library first, as `tensorrt.plugins` of a"
            " plan does. Repeatable."
        ),
        default_factory=list,
        show_default=False,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Where reports and engine go; crucible-out/NAME if left out."
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print only the JSON document on stdout, and no progress.")
]
