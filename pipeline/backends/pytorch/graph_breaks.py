"""Count the graphs that torch.compile makes of a module, its graph breaks and its recompiles.

Only Dynamo runs, which cuts the code into graphs: the graphs themselves run as they are, so no
kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.backends.pytorch.inductor import explained
from pipeline.backends.pytorch.waits import short_path
from pipeline.results.module_findings import CompiledGraphs


def count_graphs(module: Any, args: Sequence[tuple[Any, ...]], root: Path | None) -> CompiledGraphs:
    """Return the counts for a module at the sizes of `args`, in this order.

    ModelError if Dynamo cannot take the module. Paths are relative to `root`.
    """
    import torch
    import torch._dynamo
    from torch._dynamo.utils import counters

    compiled = 0

    def count(graph: Any, inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    with explained("torch.compile cannot take this module"), torch.inference_mode():
        torch._dynamo.reset()
        counters.clear()
        first = torch._dynamo.explain(module)(*args[0])
        breaks = sum(counters["graph_break"].values())
        torch._dynamo.reset()
        function = torch.compile(module, backend=count)
        function(*args[0])
        graphs = compiled
        for others in args[1:]:
            function(*others)
        torch._dynamo.reset()
    reason, where = _first_break(first.break_reasons, counters["graph_break"], root)
    return CompiledGraphs(
        graphs=graphs,
        breaks=breaks,
        first_break=reason,
        where=where,
        recompiles=compiled - graphs,
        sizes=len(args),
    )


def _first_break(
    reasons: Sequence[Any], counted: Sequence[str], root: Path | None
) -> tuple[str, str]:
    """Return the first line of the reason, and where it is; "" without a break.

    A break that leaves no graph behind is only counted: its place is unknown.
    """
    if not reasons:
        return next((str(reason).partition("\n")[0] for reason in counted), ""), ""
    first = reasons[0]
    where = ""
    if first.user_stack:
        frame = first.user_stack[-1]
        where = f"{short_path(Path(frame.filename), root)}:{frame.lineno}"
    return str(first.reason).partition("\n")[0], where
