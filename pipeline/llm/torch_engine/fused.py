"""A step of five kernels a layer, for one request. How each kernel splits its work is measured on
the weights of all layers, which no cache of the GPU holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from pipeline.errors import UnsupportedError
from pipeline.llm.torch_engine import kernels, words
from pipeline.llm.torch_engine.network import LayerWeights, Matrix
from pipeline.llm.torch_engine.products import FORMS

if TYPE_CHECKING:
    from pipeline.llm.torch_engine.decoder import Batch, Work


class Split(NamedTuple):
    """How a product is split: rows of one program, columns of one turn of its loop.

    `in_words`: quantised weights are read as words of 32 bits, which are the columns. int4 always
    is.
    """

    rows: int
    columns: int
    warps: int
    in_words: bool = False


class Extras(NamedTuple):
    """What a product does besides."""

    norm: torch.Tensor | None = None  # [in], of the norm in front of it
    residual: torch.Tensor | None = None  # [out] fp32, which is added
    gated: bool = False  # the weight has gates and values, and silu(gate) * value is the result
    epsilon: float = 0.0  # of the norm


SPLITS = (
    Split(1, 2048, 4),
    Split(2, 1024, 4),
    Split(4, 1024, 4),
    Split(4, 512, 2),
    Split(8, 512, 2),
    Split(4, 256, 1),
    Split(2, 2048, 8),
    Split(4, 2048, 8),
)
"""Turns as wide as all threads read at once, 16 bytes each: then no data crosses between warps."""

WORD_SPLITS = (
    Split(8, 128, 4, in_words=True),
    Split(4, 128, 4, in_words=True),
    Split(16, 128, 4, in_words=True),
    Split(4, 256, 4, in_words=True),
    Split(8, 64, 2, in_words=True),
    Split(16, 32, 1, in_words=True),
    Split(8, 256, 8, in_words=True),
)
"""Of quantised weights, whose columns are words of 4 or 8 values. `x` and its norm have 6 to 12
times the bytes of a row of weights: programs of less than 4 rows would read more of them than a
cache delivers.
"""

UNTUNED = Split(64, 64, 4)
BLOCKS = ((32, 4), (64, 4), (128, 8))
"""Positions of one turn of the attention, and its warps."""

SCORES_BLOCK = 1024
EMBED_BLOCK = 1024
REPLAYS = 3


def fused_step(batch: Batch, *, overlap: bool) -> Work:
    """Return the step of a batch of one request; with `overlap`, each kernel begins before the one
    in front of it has ended. UnsupportedError for several requests.
    """
    if batch.requests != 1:
        raise UnsupportedError(
            f"the fused kernels serve one request at a time, not {batch.requests}",
            "choose the compiled way",
        )
    head = batch.network.shape.head
    if head & (head - 1):
        raise UnsupportedError(
            f"the fused kernels need heads of 2^n values, not {head}", "choose the compiled way"
        )
    step = FusedStep(batch, overlap)
    step.tune()
    return step


class FusedStep:
    """The kernels of one token, and the buffers between them."""

    def __init__(self, batch: Batch, overlap: bool) -> None:
        self._batch, self._overlap = batch, overlap
        self._launch = {"launch_pdl": True} if overlap else {}
        network, shape = batch.network, batch.network.shape
        self._shape = shape
        hidden, vocabulary = network.embedding.shape[1], network.embedding.shape[0]
        wide = {"dtype": torch.float32, "device": batch.device}
        narrow = {"dtype": network.embedding.dtype, "device": batch.device}
        first = network.layers[0]
        self._x, self._attended = (torch.zeros(hidden, **wide) for _ in range(2))
        self._qkv = torch.zeros(first.qkv.weight.shape[0], **wide)
        self._seen = torch.zeros(shape.heads * shape.head, **narrow)
        self._activations = torch.zeros(first.gate_up.weight.shape[0] // 2, **narrow)
        parts = triton.cdiv(vocabulary, SCORES_BLOCK)
        self._best, self._sums = (torch.zeros(parts, **wide) for _ in range(2))
        self._places = torch.zeros(parts, dtype=torch.int64, device=batch.device)
        self._splits = dict.fromkeys(("qkv", "output", "gate_up", "down", "logits"), UNTUNED)
        self._block = BLOCKS[0]

    def __call__(self) -> None:
        batch, network = self._batch, self._batch.network
        vocabulary, hidden = network.embedding.shape
        kernels.embed[(triton.cdiv(hidden, EMBED_BLOCK),)](
            batch.tokens, network.embedding, self._x, hidden, BLOCK=EMBED_BLOCK
        )
        for number, layer in enumerate(network.layers):
            self._multiply_qkv(layer)
            self._attend(number)
            self._multiply_output(layer)
            self._multiply_gate_up(layer)
            self._multiply_down(layer)
        self._multiply_logits()
        parts = self._best.numel()
        kernels.best_of_parts[(parts,)](
            batch.scores,
            self._best,
            self._places,
            self._sums,
            vocabulary,
            BLOCK=SCORES_BLOCK,
            OVERLAP=self._overlap,
            **self._launch,
        )
        kernels.choice[(1,)](
            self._best,
            self._places,
            self._sums,
            batch.tokens,
            batch.log_probs,
            batch.positions,
            parts,
            BLOCK=triton.next_power_of_2(parts),
            OVERLAP=self._overlap,
            **self._launch,
        )

    # -- the parts ---------------------------------------------------------------

    def _multiply_qkv(self, layer: LayerWeights) -> None:
        self._multiply("qkv", self._x, layer.qkv, self._qkv, Extras(layer.attention_norm))

    def _multiply_output(self, layer: LayerWeights) -> None:
        extras = Extras(residual=self._x)
        self._multiply("output", self._seen, layer.output, self._attended, extras)

    def _multiply_gate_up(self, layer: LayerWeights) -> None:
        extras = Extras(layer.mlp_norm, gated=True)
        self._multiply("gate_up", self._attended, layer.gate_up, self._activations, extras)

    def _multiply_down(self, layer: LayerWeights) -> None:
        extras = Extras(residual=self._attended)
        self._multiply("down", self._activations, layer.down, self._x, extras)

    def _multiply_logits(self) -> None:
        network = self._batch.network
        extras = Extras(network.norm)
        self._multiply("logits", self._x, network.logits, self._batch.scores, extras)

    def _multiply(
        self, role: str, x: torch.Tensor, matrix: Matrix, out: torch.Tensor, extras: Extras
    ) -> None:
        extras = extras._replace(epsilon=self._shape.epsilon)
        multiply(x, matrix, out, self._splits[role], extras, overlap=self._overlap)

    def _attend(self, number: int) -> None:
        batch, shape = self._batch, self._shape
        layer, cache = batch.network.layers[number], batch.caches[number]
        block, warps = self._block
        kernels.attention[(shape.heads,)](
            self._qkv,
            cache.keys,
            cache.values,
            self._seen,
            batch.cosines,
            batch.sines,
            batch.positions,
            self._qkv if layer.query_norm is None else layer.query_norm,
            self._qkv if layer.key_norm is None else layer.key_norm,
            shape.epsilon,
            shape.head**-0.5,
            batch.context,
            HEADS=shape.heads,
            CACHE_HEADS=shape.cache_heads,
            HALF=shape.head // 2,
            BLOCK=block,
            NORMS=layer.query_norm is not None,
            OVERLAP=self._overlap,
            num_warps=warps,
            **self._launch,
        )

    # -- tuning ------------------------------------------------------------------

    def tune(self) -> None:
        """Measure each split on this GPU, and keep the fastest ones. Nothing on a CPU."""
        if self._batch.device.type != "cuda":
            return
        layers = self._batch.network.layers
        by_role: dict[str, Callable[[LayerWeights], None]] = {
            "qkv": self._multiply_qkv,
            "output": self._multiply_output,
            "gate_up": self._multiply_gate_up,
            "down": self._multiply_down,
            "logits": lambda _: self._multiply_logits(),
        }
        for role, work in by_role.items():
            matrix = getattr(layers[0], role, self._batch.network.logits)
            splits = splits_of(matrix)

            def through_all(split: Split, role: str = role, work: object = work) -> None:
                assert callable(work)
                self._splits[role] = split
                for layer in layers if role != "logits" else layers[:1]:
                    work(layer)

            self._splits[role] = fastest(splits, through_all)

        def attend(block: tuple[int, int]) -> None:
            self._block = block
            for number in range(len(layers)):
                self._attend(number)

        self._batch.positions.fill_(self._batch.context // 2)
        self._block = fastest(BLOCKS, attend)
        self._batch.positions.zero_()


def splits_of(matrix: Matrix) -> tuple[Split, ...]:
    """Return the splits of which the fastest is looked for."""
    if matrix.scale is None:
        return SPLITS
    return WORD_SPLITS if matrix.group else (*SPLITS, *WORD_SPLITS)


def multiply(
    x: torch.Tensor,
    matrix: Matrix,
    out: torch.Tensor,
    split: Split,
    extras: Extras,
    *,
    overlap: bool = False,
) -> None:
    """Write the product of a vector and a linear layer into `out`, by the kernel of the split."""
    weight, scale, bias, zero = matrix
    rows = weight.shape[0] // (2 if extras.gated else 1)
    grid = (triton.cdiv(rows, split.rows),)
    norm = weight if extras.norm is None else extras.norm
    residual = x if extras.residual is None else extras.residual
    rest = (weight if bias is None else bias, residual, out, rows)
    flags: dict[str, Any] = {
        "ROWS": split.rows,
        "COLUMNS": split.columns,
        "NORM": extras.norm is not None,
        "BIAS": bias is not None,
        "RESIDUAL": extras.residual is not None,
        "GATED": extras.gated,
        "OVERLAP": overlap,
        "num_warps": split.warps,
    }
    if overlap:
        flags["launch_pdl"] = True
    if scale is None or not (split.in_words or matrix.group):
        scales = weight if scale is None else scale
        kernels.product[grid](
            x,
            norm,
            weight,
            scales,
            *rest,
            weight.shape[1],
            extras.epsilon,
            SCALE=scale is not None,
            **flags,
        )
        return
    packed = weight.view(torch.int32)
    words.quantised_product[grid](
        x,
        norm,
        packed,
        scale,
        scale if zero is None else zero,
        *rest,
        packed.shape[1],
        extras.epsilon,
        FORM=FORMS[weight.dtype],
        GROUP=matrix.group,
        ZERO=zero is not None,
        **flags,
    )


def fastest(ways: Sequence[Any], work: Callable[[Any], None]) -> Any:
    """Return the way whose recorded work takes the shortest time on the GPU. Ways that need more
    registers or shared memory than there are drop out.
    """
    times = dict[int, float]()
    failure: Exception | None = None
    for number, way in enumerate(ways):
        try:
            times[number] = seconds_of(partial(work, way))
        except triton.runtime.errors.OutOfResources as error:
            failure = error
    if not times:
        raise UnsupportedError(f"no split fits this GPU: {failure}", "choose the compiled way")
    return ways[min(times, key=times.__getitem__)]


def seconds_of(work: Callable[[], None]) -> float:
    """Return the shortest time of a replay of some work."""
    from pipeline.llm.torch_engine.decoder import recorded

    replay = recorded(work, torch.device("cuda"))
    found = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        found.append(float(start.elapsed_time(stop)) / 1e3)
    return min(found)
