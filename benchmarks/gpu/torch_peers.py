"""PyTorch's own ways to run a model on the GPU, as sessions: eager, traced, a CUDA graph,
torch.compile, and flash attention forced.

`KIND PRECISION` names one: `eager fp32`, `graph fp16`. In fp16 the module is cast as a whole and
takes and returns fp32, as our engines do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.backends.pytorch.cuda import DEVICE, CudaTorchSession
from pipeline.backends.pytorch.module import load_module, tensor_from_array
from pipeline.core.artifacts import Engine, ModelSource, OnnxModel, Target
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Tensors
from pipeline.measurement.clock import monotonic

FILE = "source.json"
COMPILE_MODES = ("max-autotune", "reduce-overhead")
LIMIT_S = 240.0  # for max-autotune; beyond, reduce-overhead stands in
ATTENTION = re.compile(r"flash|fmha|attention|attn|sdpa|softmax", re.IGNORECASE)
SLOWEST = 5
RUNS = 20


def peer_engine(
    source: ModelSource, model: OnnxModel, name: str, target: Target, out: Path
) -> Engine:
    """What a child needs to load the peer called `name`."""
    kind, precision = name.split()
    folder = out / name.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(source.model_dump_json(), encoding="utf-8")
    recipe = Recipe(backend="pytorch", precision=Precision(precision), variant=kind)
    return Engine(
        root=folder,
        file=FILE,
        digest=source.digest,
        target=target,
        recipe=recipe,
        threads=0,
        size_bytes=0,
        inputs=model.inputs,
        outputs=model.outputs,
        profiles=(),
    )


def open_peer(engine: Engine, feeds: Tensors, mode: str) -> tuple[CudaTorchSession, dict[str, Any]]:
    """The session, and what is to be told of it. `mode` is torch.compile's."""
    source = ModelSource.model_validate_json(engine.path.read_text(encoding="utf-8"))
    module = cast_module(load_module(source, DEVICE), engine.recipe.precision)
    args = tuple(tensor_from_array(feeds[spec.name]).to(DEVICE) for spec in engine.inputs)
    facts = {"mode": mode} if engine.recipe.variant == "compile" else {}
    return CudaTorchSession(engine, WAYS[engine.recipe.variant](module, args, mode)), facts


def cast_module(module: Any, precision: Precision) -> Any:
    """The module in this precision, with fp32 outside."""
    import torch

    if precision is Precision.FP32:
        return module
    low = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}[precision]

    class Cast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module.to(low)

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(
                *(arg.to(low) if arg.is_floating_point() else arg for arg in args)
            )
            return result.float()

    return Cast().eval()


# -- ways to run it ----------------------------------------------------------


def _eager(module: Any, args: tuple[Any, ...], mode: str) -> Any:
    return module


def _traced(module: Any, args: tuple[Any, ...], mode: str) -> Any:
    import torch

    with torch.inference_mode():
        return torch.jit.optimize_for_inference(
            torch.jit.freeze(torch.jit.trace(module, args, check_trace=False))
        )


class Graphed:
    """A module captured at its first run; from then on the arguments must stay where they were."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._graph: Any = None
        self._result: Any = None

    def __call__(self, *args: Any) -> Any:
        if self._graph is None:
            self._capture(args)
        self._graph.replay()
        return self._result

    def _capture(self, args: tuple[Any, ...]) -> None:
        import torch

        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(3):  # lazy initialisation must not be captured
                self._module(*args)
        current.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = self._module(*args)


def _graph(module: Any, args: tuple[Any, ...], mode: str) -> Any:
    return Graphed(module)


def _flash(module: Any, args: tuple[Any, ...], mode: str) -> Any:
    """In a CUDA graph. Flash attention takes no mask, so the ids go in alone: where the row has a
    mask, this does less than ours.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def run(ids: Any, *_: Any) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), unmasked_attention():
            return module(ids)

    return Graphed(run)


@contextmanager
def unmasked_attention() -> Iterator[None]:
    """Attention gets no mask. transformers makes one of ones where it cannot look at the values:
    while a CUDA graph is captured.
    """
    from torch.nn import functional

    attention = functional.scaled_dot_product_attention

    def unmasked(query: Any, key: Any, value: Any, attn_mask: Any = None, **named: Any) -> Any:
        return attention(query, key, value, **named)

    functional.scaled_dot_product_attention = unmasked  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = attention


def _compiled(module: Any, args: tuple[Any, ...], mode: str) -> Any:
    import torch

    compiled = torch.compile(module, mode=mode)
    with torch.inference_mode():
        compiled(*args)
        compiled(*args)  # the second records the CUDA graph
    torch.cuda.synchronize()
    return compiled


WAYS: Mapping[str, Callable[[Any, tuple[Any, ...], str], Any]] = {
    "eager": _eager,
    "traced": _traced,
    "graph": _graph,
    "flash": _flash,
    "compile": _compiled,
}


# -- what to tell of them ----------------------------------------------------


def cache_folder(home: Path) -> None:
    """Keep what Inductor compiles and tunes in one place, for the children that come, and for the
    next command.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home / "inductor"))


def look_at(
    engine: Engine, feeds: Tensors, mode: str, progress: Progress = silent
) -> dict[str, Any]:
    """In a child of its own, before the race: compile time and recompilations of torch.compile, and
    the kernels that a peer really runs.

    What is compiled here lies in Inductor's cache when the race loads it. The profiler's traces
    stay out of the race.
    """
    import torch
    from torch._dynamo.utils import counters

    begin = monotonic()
    session, facts = open_peer(engine, feeds, mode)
    seconds, graphs = monotonic() - begin, counters["stats"]["unique_graphs"]
    session.bind(feeds)
    session.upload()
    for _ in range(RUNS):
        session.execute()
        session.synchronize()
    if engine.recipe.variant == "compile":
        recompiled, breaks = (
            counters["stats"]["unique_graphs"] - graphs,
            sum(counters["graph_break"].values()),
        )
        facts |= {
            "compile_s": round(seconds, 1),
            "graphs": graphs,
            "recompilations": recompiled,
            "graph_breaks": breaks,
        }
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        session.execute()
        session.synchronize()
        torch.cuda.synchronize()
    events = [(str(event.key), _device_us(event), event.count) for event in profiler.key_averages()]
    return facts | kernels(events)


def _device_us(event: Any) -> float:
    return float(getattr(event, "self_device_time_total", 0.0) or 0.0)


def kernels(events: list[tuple[str, float, int]]) -> dict[str, Any]:
    """Which operator took over scaled_dot_product_attention, and by which kernels; and the slowest
    kernels. Pure: (name, us, count) each.
    """
    chosen = [name for name, _, _ in events if name.startswith("aten::_scaled_dot_product")]
    on_gpu = sorted(
        (
            (name, us, count)
            for name, us, count in events
            if us > 0 and not name.startswith("aten::")
        ),
        key=lambda event: -event[1],
    )
    return {
        "sdpa_operators": chosen,
        "attention_kernels": [
            f"{count} x {name[:120]}" for name, _, count in on_gpu if ATTENTION.search(name)
        ][:SLOWEST],
        "slowest_kernels": [
            f"{us:.0f} us in {count} x {name[:120]}" for name, us, count in on_gpu[:SLOWEST]
        ],
    }
