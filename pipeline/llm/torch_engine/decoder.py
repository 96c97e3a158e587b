"""Answers from a network: prompts are read at once, then one recorded step makes each token.

A step chooses the token on the device, writes it where the next step reads it, and moves the
position there, so the host only sends steps ahead and reads tokens as they come.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch

from pipeline.errors import InternalError, UnsupportedError
from pipeline.llm.reference import Ids
from pipeline.llm.served import Generation
from pipeline.llm.torch_engine.buffers import Buffers
from pipeline.llm.torch_engine.network import Cache, Network, Place, block, choice, logits
from pipeline.measurement.clock import monotonic

Way = Literal["eager", "compiled", "fused", "overlapped"]
Work = Callable[[], None]

AHEAD = 8
"""Steps that are sent before their tokens are read: the GPU never waits for the host."""

PROMPT_MULTIPLE = 64
"""Prompts are padded to such lengths, each of which is recorded once."""

RECOMPILES = 64
"""Shapes that torch.compile may meet before it gives up: one for each number of requests."""


OVERLAP_CAPABILITY = (9, 0)
"""From this compute capability on, a kernel can begin before the one in front of it has ended."""


def way_for(network: Network, requests: int) -> Way:
    """Return the fastest way that this device and this number of requests have."""
    device, head = network.embedding.device, network.shape.head
    if device.type != "cuda":
        return "eager"
    if requests > 1 or head & (head - 1):
        return "compiled"
    has_overlap = torch.cuda.get_device_capability(device) >= OVERLAP_CAPABILITY
    return "overlapped" if has_overlap else "fused"


class Functions(NamedTuple):
    """The parts of a step that may be compiled."""

    block: Callable[..., Any]
    logits: Callable[..., Any]
    choice: Callable[..., Any]


EAGER = Functions(block, logits, choice)


class Step(Protocol):
    """Makes one token of each request of a batch, in its buffers."""

    def __call__(self) -> None: ...


def compiled() -> Functions:
    """Return the parts compiled for one shape at a time. All layers share what is compiled."""
    torch._dynamo.config.recompile_limit = RECOMPILES
    options = {"coordinate_descent_tuning": torch.cuda.is_available()}

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        made: Callable[..., Any] = torch.compile(
            function, dynamic=False, fullgraph=True, options=options
        )
        return made

    return Functions(of(block), of(logits), of(choice))


def recorded(work: Work, device: torch.device, memory: Any = None) -> Work:
    """Return what does this work again: the replay of a CUDA graph, or the work itself on a CPU.
    The work is done some times first.

    Works that share `memory` compute in the same place, and each overwrites what the others left
    there. So their results must be outside, where they were allocated before: a step and a reader
    of prompts copy theirs into Buffers, and what a step of fused kernels keeps is made before.
    And one must end before the next begins: all are replayed by one thread on one stream.
    """
    if device.type != "cuda":
        return work
    stream = recording_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles, tunes and makes the workspace of cuBLAS
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory, stream=stream):
        work()
    return Recording(graph.replay, work)


@functools.cache
def recording_stream() -> Any:
    """One stream for all works: cuBLAS has a workspace of many MiB for each, and keeps it."""
    return torch.cuda.Stream()


class Recording:
    """A recorded work. It keeps the work, whose buffers the graph reads and writes: memory that
    was free again would soon hold something else.
    """

    def __init__(self, replay: Work, work: Work) -> None:
        self._replay, self.work = replay, work

    def __call__(self) -> None:
        self._replay()


def through(
    x: torch.Tensor,
    network: Network,
    caches: Sequence[Cache],
    place: Place,
    functions: Functions,
) -> torch.Tensor:
    """Return what all layers make of embeddings, [requests, tokens, hidden]."""
    for weights, cache in zip(network.layers, caches, strict=True):
        x = functions.block(x, weights, cache, place, network.shape)
    return x


class Batch:
    """The buffers of a number of requests that are served together, and their step. With `buffers`,
    these are the first rows of buffers that others share.
    """

    def __init__(
        self,
        network: Network,
        requests: int,
        context: int,
        way: Way,
        buffers: Buffers | None = None,
    ) -> None:
        self.network, self.requests, self.way = network, requests, way
        self.device = network.embedding.device
        own = buffers or Buffers.for_network(network, requests, context)
        self.buffers = own.first(requests)
        self.context = own.context
        self.caches = self.buffers.caches
        self.tokens, self.positions = self.buffers.tokens, self.buffers.positions
        self.log_probs, self.scores = self.buffers.log_probs, self.buffers.scores
        self.cosines, self.sines = own.cosines, own.sines
        with torch.no_grad():
            self._step = recorded(self._make_step(way), self.device, self.buffers.graphs)
        self._prompts = dict[int, tuple[torch.Tensor, Work]]()

    # -- the work of the device ------------------------------------------------

    def _make_step(self, way: Way) -> Work:
        if way in ("fused", "overlapped"):
            from pipeline.llm.torch_engine.fused import fused_step

            return fused_step(self, overlap=way == "overlapped")
        functions = EAGER if way == "eager" else compiled()

        def step() -> None:
            x = self.network.embedding[self.tokens][:, None]
            place = self.buffers.place_of(self.positions[:, None])
            x = through(x, self.network, self.caches, place, functions)
            self._choose(x[:, 0], functions)
            # a row whose text has ended stays at the last place until it is used again
            self.positions.add_(1).clamp_(max=self.context - 1)

        return step

    def _choose(self, x: torch.Tensor, functions: Functions) -> None:
        network = self.network
        scores = functions.logits(x, network.norm, network.logits, network.shape.epsilon)
        tokens, log_probs = functions.choice(scores)
        self.scores.copy_(scores)
        self.tokens.copy_(tokens)
        self.log_probs.copy_(log_probs)

    def _read_prompts(self, given: torch.Tensor) -> None:
        """Read prompts, padded to one length: [requests, tokens]. `positions` hold their lengths.
        What padding leaves in the cache is never seen: answers write over it.
        """
        places = torch.arange(given.shape[1], device=self.device).expand_as(given)
        place = self.buffers.place_of(places, is_start=True)
        x = through(self.network.embedding[given], self.network, self.caches, place, EAGER)
        rows = torch.arange(self.requests, device=self.device)
        self._choose(x[rows, self.positions - 1], EAGER)

    # -- what the host asks ----------------------------------------------------

    def step(self) -> None:
        """Make one token of each request from the last ones."""
        self._step()

    def start(self, prompts: Sequence[Ids]) -> None:
        """Read prompts, and choose the first token of each answer."""
        lengths = [prompt.size for prompt in prompts]
        longest = min(-(-max(lengths) // PROMPT_MULTIPLE) * PROMPT_MULTIPLE, self.context)
        with torch.no_grad():
            given, work = self._prompt_reader(longest)
            padded = np.zeros((self.requests, longest), dtype=np.int64)
            for row, prompt in zip(padded, prompts, strict=True):
                row[: prompt.size] = prompt
            given.copy_(torch.from_numpy(padded))
            self.positions.copy_(torch.tensor(lengths))
            work()

    def _prompt_reader(self, length: int) -> tuple[torch.Tensor, Work]:
        if length not in self._prompts:
            given = torch.zeros((self.requests, length), dtype=torch.int64, device=self.device)
            self.positions.fill_(1)
            memory = self.buffers.graphs
            work = recorded(lambda: self._read_prompts(given), self.device, memory)
            self._prompts[length] = given, work
        return self._prompts[length]

    def read_whole(self, prompt: Ids) -> torch.Tensor:
        """Read a prompt as `start` does, of a batch of one, and return the scores of all
        successors, [tokens, vocabulary] fp32.
        """
        with torch.no_grad():
            given = torch.from_numpy(prompt)[None].to(self.device)
            places = torch.arange(prompt.size, device=self.device)[None]
            place = self.buffers.place_of(places, is_start=True)
            x = through(self.network.embedding[given], self.network, self.caches, place, EAGER)
            self.positions.fill_(prompt.size)
            network = self.network
            return EAGER.logits(x[0], network.norm, network.logits, network.shape.epsilon)

    def read_next(self, tokens: Sequence[int]) -> torch.Tensor:
        """Read these tokens instead of the ones that were chosen, by the step that answers. Return
        the scores of their successors, [requests, vocabulary] fp32.
        """
        with torch.no_grad():
            self.tokens.copy_(torch.tensor(tokens))
            self._step()
            return self.scores.clone()


def check_window(network: Network, context: int) -> None:
    """UnsupportedError for texts longer than the network's window: attention here always looks back
    on all tokens.
    """
    if network.window is not None and context > network.window:
        raise UnsupportedError(
            f"this model looks back {network.window} tokens, and {context} are asked: our decoder"
            " has no sliding window",
            f"set `context: {network.window}`, or less",
        )


class Decoder:
    """An opened network. Batches are made when they are first needed.

    Without `way`, each batch gets the fastest one for its device and size. UnsupportedError for
    texts longer than the network's window.
    """

    def __init__(self, network: Network, context: int, way: Way | None = None) -> None:
        check_window(network, context)
        self.network, self.context, self._way = network, context, way
        self._batches = dict[int, Batch]()

    def batch(self, requests: int) -> Batch:
        if requests not in self._batches:
            way = self._way or way_for(self.network, requests)
            self._batches[requests] = Batch(self.network, requests, self.context, way)
        return self._batches[requests]

    def generate_together(self, prompts: Sequence[Ids], tokens: int) -> tuple[Generation, ...]:
        """Continue prompts greedily by this number of tokens each."""
        longest = max(prompt.size for prompt in prompts) + tokens
        if longest > self.context:
            raise InternalError(f"{longest} tokens, and there is room for {self.context}")
        batch = self.batch(len(prompts))
        on_gpu = batch.device.type == "cuda"
        shape = (tokens, len(prompts))
        found = torch.zeros(shape, dtype=torch.int64, pin_memory=on_gpu)
        log_probs = torch.zeros(shape, dtype=torch.float32, pin_memory=on_gpu)
        times_s, waiting = list[float](), deque[Mark]()
        begin = monotonic()
        for number in range(tokens):
            if number:
                batch.step()
            else:
                batch.start(prompts)
            found[number].copy_(batch.tokens, non_blocking=True)
            log_probs[number].copy_(batch.log_probs, non_blocking=True)
            waiting.append(mark(on_gpu))
            if len(waiting) > AHEAD or not on_gpu:
                waiting.popleft().synchronize()
                times_s.append(monotonic() - begin)
        while waiting:
            waiting.popleft().synchronize()
            times_s.append(monotonic() - begin)
        return tuple(
            Generation(
                found[:, row].numpy().copy(),
                log_probs[:, row].double().numpy(),
                tuple(times_s),
            )
            for row in range(len(prompts))
        )

    def cache_bytes_per_token(self) -> float:
        return float(self.network.cache_bytes_per_token)


class Mark(Protocol):
    """A place in the work of a device."""

    def synchronize(self) -> object:
        """Wait until the device has come there."""
        ...


class _Done:
    """The mark of a device that has done all it was told."""

    def synchronize(self) -> None:
        return


def mark(on_gpu: bool) -> Mark:
    """Return a mark that the device reaches after all that it was told."""
    if not on_gpu:
        return _Done()
    event: Mark = torch.cuda.Event()
    torch.cuda.current_stream().record_event(event)
    return event
