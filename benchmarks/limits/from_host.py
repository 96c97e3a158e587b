"""Whole runs from numpy arrays to numpy arrays: our sessions and PyTorch at its best, one run after
another, or several that overlap.

PyTorch at its best: torch.compile in fp16 (a CUDA graph is part of it), channels_last, the input
sent straight from its array or by way of pinned memory, whichever is faster in a short trial in
every process, and the answer in pinned memory of its own, which is not copied again. What overlaps
has a stream for each run; only the graph's replays, which share their buffers, wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from benchmarks.gpu.contest import Entrant, Runner, Single, begun, take_rounds
from benchmarks.gpu.torch_peers import WAYS, cast_module
from pipeline import backends
from pipeline.backends.base import Session, run_session
from pipeline.backends.pytorch.cuda import DEVICE, CudaTorchSession
from pipeline.backends.pytorch.module import leaves_of, load_module, tensor_from_array
from pipeline.backends.pytorch.preprocessing import with_preprocessing
from pipeline.benchmark.interleaved import Block
from pipeline.core.artifacts import Engine, ModelSource
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision
from pipeline.core.shapes import Tensors
from pipeline.measurement.clock import measure_block, monotonic

TRIAL_RUNS = 20
UPLOADS = ("by pinned memory", "straight")


@dataclass(slots=True)
class Overlapped:
    """Sessions that take turns: while one computes, the host copies for the next. `run` is a round
    of `depth` runs of each, about ROUND_S.
    """

    sessions: Sequence[Session]
    feeds: Tensors
    depth: int = 0  # 0: to be found by the first run

    def run(self) -> Tensors:
        if self.depth:
            self.rounds(self.depth)
            return {}
        answer, self.depth = begun(self.sessions, self.feeds, partial(self.rounds, 1))
        return answer

    def rounds(self, depth: int) -> None:
        for number in range(depth):
            for session in self.sessions:
                if number:
                    _finish(session)
                session.bind(self.feeds)
                session.upload()
                session.execute()
                session.download()
        for session in self.sessions:
            _finish(session)

    def take(self, seconds: float) -> Block:
        return take_rounds(self.run, self.depth * len(self.sessions), seconds)


def _finish(session: Session) -> None:
    session.synchronize()
    session.fetch()


@contextmanager
def opened_from_host(entrant: Entrant, feeds: Tensors) -> Iterator[tuple[Runner, dict[str, Any]]]:
    """The entrant's sessions with feeds in ordinary or in page-locked memory."""
    with ExitStack() as stack:
        facts: dict[str, Any] = {}
        sessions: Sequence[Session]
        if entrant.way == "torch":
            if entrant.pinned:
                feeds = pinned_by_torch(feeds)
            found, facts = open_torch(entrant.engine, feeds, entrant)
            sessions = [stack.enter_context(closing(session)) for session in found]
        else:
            loaded = stack.enter_context(closing(backends.load(entrant.engine)))
            if entrant.pinned:
                feeds = pinned_by_us(entrant.engine, feeds)
            sessions = [
                stack.enter_context(closing(loaded.session(0))) for _ in range(entrant.sessions)
            ]
        single = len(sessions) == 1
        yield (Single(sessions[0], feeds) if single else Overlapped(sessions, feeds)), facts


def pinned_by_us(engine: Engine, feeds: Tensors) -> Tensors:
    """The same values in arrays of `input_buffer`."""
    buffers = {
        name: backends.input_buffer(engine, name, array.shape) for name, array in feeds.items()
    }
    for name, array in feeds.items():
        buffers[name][...] = array
    return buffers


def pinned_by_torch(feeds: Tensors) -> Tensors:
    """The same values in arrays of PyTorch's pinned memory."""
    return {name: tensor_from_array(array).pin_memory().numpy() for name, array in feeds.items()}


# -- PyTorch -----------------------------------------------------------------


@dataclass(slots=True)
class Replays:
    """When the last replay of a graph and the download of its answer are over."""

    over: Any = None  # torch.cuda.Event


@dataclass(slots=True)
class Way:
    """How an input travels; chosen by a trial."""

    upload: str = UPLOADS[0]


class HostTorchSession(CudaTorchSession):
    """A session whose answers are not copied a second time. Sessions of one module share `replays`
    and `way`.
    """

    def __init__(self, engine: Engine, module: Any, replays: Replays, way: Way) -> None:
        super().__init__(engine, module)
        self._replays, self._way = replays, way
        self._given: dict[str, Any] = {}
        self._answers: dict[str, Any] = {}

    def bind(self, feeds: Tensors) -> None:
        import torch

        self._check(feeds)
        torch.cuda.set_stream(self._stream)
        self._stream.synchronize()  # an unfinished upload would still read the buffers
        for spec in self.inputs:
            tensor = self._given[spec.name] = tensor_from_array(feeds[spec.name])
            if spec.name not in self._args:
                self._allocate(spec.name, tensor)
            if self._way.upload == UPLOADS[0]:
                self._sent[spec.name].copy_(tensor)

    def upload(self) -> None:
        import torch

        torch.cuda.set_stream(self._stream)
        sources = self._sent if self._way.upload == UPLOADS[0] else self._given
        for name, tensor in self._args.items():
            tensor.copy_(sources[name], non_blocking=True)

    def execute(self) -> None:
        if self._replays.over is not None:
            self._stream.wait_event(self._replays.over)
        super().execute()

    def download(self) -> None:
        import torch

        torch.cuda.set_stream(self._stream)
        with torch.inference_mode():
            for name, tensor in zip(self._names, leaves_of(self._result), strict=True):
                self._answers[name] = tensor.to("cpu", non_blocking=True)
        self._replays.over = self._stream.record_event()

    def fetch(self) -> Mapping[str, Any]:
        return {name: tensor.numpy() for name, tensor in self._answers.items()}


def open_torch(
    engine: Engine, feeds: Tensors, entrant: Entrant
) -> tuple[list[HostTorchSession], dict[str, Any]]:
    """Sessions of one compiled module, and the way in which its inputs travel."""
    module = compiled(engine, feeds, entrant.mode)
    replays, way = Replays(), Way(UPLOADS[1] if entrant.pinned else UPLOADS[0])
    sessions = [
        HostTorchSession(engine, module, replays, way) for _ in range(max(1, entrant.sessions))
    ]
    if not entrant.pinned:
        way.upload = faster_upload(sessions[0], feeds, way)
    return sessions, {"mode": entrant.mode, "upload": way.upload}


def faster_upload(session: Session, feeds: Tensors, way: Way) -> str:
    """The way in which whole runs are faster."""
    found = {}
    for upload in UPLOADS:
        way.upload = upload
        run = partial(run_session, session, feeds)
        measure_block(run, min_s=0.0, min_runs=3)
        found[upload] = median(measure_block(run, min_s=0.0, min_runs=TRIAL_RUNS))
    return min(found, key=lambda upload: found[upload])


def compiled(engine: Engine, feeds: Tensors, mode: str) -> Any:
    """The module in fp16 and channels_last, behind its preprocessing, compiled for these shapes."""
    source = ModelSource.model_validate_json(engine.path.read_text(encoding="utf-8"))
    module = channels_last(cast_module(load_module(source, DEVICE), Precision.FP16))
    args = tuple(tensor_from_array(feeds[spec.name]).to(DEVICE) for spec in engine.inputs)
    return WAYS["compile"](with_preprocessing(module, source, DEVICE), args, mode)


def channels_last(module: Any) -> Any:
    """The module with images and weights in the layout [N, H, W, C]; other inputs as they are."""
    import torch

    class ChannelsLast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module.to(memory_format=torch.channels_last)

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(
                *(
                    arg.contiguous(memory_format=torch.channels_last) if arg.dim() == 4 else arg
                    for arg in args
                )
            )
            return result

    return ChannelsLast().eval()


def compile_once(engine: Engine, feeds: Tensors, mode: str, progress: Progress = silent) -> float:
    """In a child of its own: fill Inductor's cache for the race; the seconds that it took."""
    begin = monotonic()
    compiled(engine, feeds, mode)
    return monotonic() - begin
