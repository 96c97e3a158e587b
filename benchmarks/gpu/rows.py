"""The rows of the table: which model at which shape, what runs it, what to reach; and how the
command line, results and pages name them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

COMMAND = ("python", "-m", "benchmarks", "gpu_models")
H200 = "H200"  # the GPU that the probe's figures and the limits in milliseconds or images are of
BARE, PROBE, SESSION = (
    1.03,
    1.05,
    1.02,
    # the most that ours may take of a bare build, of the probe's time, of a bare loop on our own
    # engine
)
EXTRA_US = 25.0  # the most that a whole run may take longer than on a bare loop, where it is short
SHORT_MS = 2.0  # of the GPU's work: below, EXTRA_US counts, above, SESSION

WAYS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "tf32": {"precision": "tf32"},
    "fp16": {"precision": "fp16"},
    "fp16 surgery": {"precision": "fp16"},
    "fp16 folded": {"precision": "fp16"},
    "fp16 level 5": {"precision": "fp16"},
    "fp16 flags": {"precision": "fp16", "precision_from": "flags"},
    "int8": {"precision": "int8"},
    "int8 no residual": {"precision": "int8", "placement": {"residual_add": False}},
    "int8 no first": {"precision": "int8", "placement": {"first_layer": False}},
    "int8 surgery": {"precision": "int8"},
    "int8 folded": {"precision": "int8"},
    "int8 modelopt": {"precision": "int8", "quantizer": "modelopt"},
    "int8 implicit": {"precision": "int8", "precision_from": "flags", "method": "entropy"},
    "int8 implicit folded": {"precision": "int8", "precision_from": "flags", "method": "entropy"},
    "fp8": {"precision": "fp8"},
}
"""Candidates by their short names; each is one of the plan's. `surgery`: of the graph with plain
attention (`simplify.rewrite_attention`); `folded`: besides, with the first convolution's stride
folded into its channels (pipeline/onnx_graph/space_to_depth.py). `no residual`: what is added keeps
its precision; `no first`: the first layer does, in fp16. `level 5`: built at TensorRT's highest
optimisation level, which tries more kernels. `flags`: TensorRT chooses the precision of each layer
itself, as in `int8 implicit`.
"""

TITLES = {
    "resnet50": "ResNet-50",
    "mobilenet_v2": "MobileNetV2",
    "vit_b_16": "ViT-B/16",
    "swin_t": "Swin-T",
    "encoder": "BERT-base",
}
"""The models of the rows in words."""
USUAL_SIDE = 224  # pixels

SETTINGS = {
    " folded": "`simplify.surgery: pipeline.folding:fold_strides`",
    " level 5": "`tensorrt.optimization_level: 5`",
    "fp16 flags": "a candidate with `precision_from: flags`",
    "int8 modelopt": "a candidate with `quantizer: modelopt`",
    "int8 no residual": "a candidate with `placement: {residual_add: false}`",
    "int8 no first": "a candidate with `placement: {first_layer: false}`",
    "fp8": "a candidate in fp8",
}
"""What a plan has to say, beside its model and data, for the ways whose names end so."""
SURGERY = " surgery"
AS_EXPORTED = "`simplify.rewrite_attention: false`"

FP16_PEERS = ("eager fp16", "graph fp16", "compile fp16")
FLOAT_PEERS = ("eager fp32", *FP16_PEERS)

Direction = Literal["at least", "at most"]


@dataclass(frozen=True, slots=True)
class Goal:
    """Ours against others in the same run, by the GPU's time: others over ours at least, or ours
    over others at most, `limit`.

    Of several names on one side the fastest counts.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    direction: Direction
    limit: float


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `probe`: the probe's medians in ms by way."""

    name: str
    model: str  # function of nets.py
    inputs: Mapping[str, tuple[int | str, ...]]  # shape of each; int64 for ids and masks
    ways: tuple[str, ...]
    minutes: float  # an estimate with cold caches, on one H200
    peers: tuple[str, ...] = FP16_PEERS
    probe: Mapping[str, float] = field(default_factory=dict)
    goals: tuple[Goal, ...] = ()
    output: str = "logits"
    dtypes: Mapping[str, str] = field(
        default_factory=dict
    )  # of inputs that are not what their name says
    gain: tuple[str, str, float] | None = (
        None  # (slow, fast, least): two peers whose ratio is compared with a published one
    )

    @property
    def title(self) -> str:
        """The model and its shape in words: `BERT-base, batch 32, 128 tokens`. Images have 224 x
        224 pixels if it says nothing.
        """
        parts = [TITLES[self.model], f"batch {self.batch}"]
        if "image" in self.inputs:
            side = self.inputs["image"][-1]
            return ", ".join(parts if side == USUAL_SIDE else [*parts, f"{side} x {side} pixels"])
        tokens = next(iter(self.inputs.values()))[-1]
        mask = "" if "attention_mask" in self.inputs else ", no mask"
        return ", ".join([*parts, f"{tokens} tokens{mask}"])

    @property
    def batch(self) -> int:
        first = next(iter(self.inputs.values()))[0]
        return first if isinstance(first, int) else 1

    def dtype(self, name: str) -> str:
        return self.dtypes.get(name, "float32" if name == "image" else "int64")


def image(batch: int, side: int = USUAL_SIDE) -> dict[str, tuple[int | str, ...]]:
    return {"image": (batch, 3, side, side)}


def _text(batch: int, tokens: int, masked: bool = True) -> dict[str, tuple[int | str, ...]]:
    return dict.fromkeys(("input_ids", "attention_mask")[: 1 + masked], (batch, tokens))


def _faster(limit: float, *theirs: str, ours: tuple[str, ...] = ("fp16",)) -> Goal:
    return Goal(ours, theirs, "at least", limit)


ANY = (
    "fp16",
    "fp16 surgery",
    "fp16 folded",
    "int8",
    "int8 surgery",
    "int8 folded",
    "int8 modelopt",
    "fp8",
)
TORCH_BEST = ("eager fp16", "graph fp16", "compile fp16")
FLASH = (
    "flash fp16",
    # SDPA forced to flash attention in a CUDA graph; it takes no mask, so where the row has one it
    # does less than ours
)


def _encoder(
    name: str,
    batch: int,
    tokens: int,
    masked: bool,
    ways: tuple[str, ...],
    minutes: float,
    **more: Any,
) -> Row:
    return Row(
        name, "encoder", _text(batch, tokens, masked), ways, minutes, output="hidden", **more
    )


PLAIN = ("fp16", "fp16 surgery")
MASKED = (*PLAIN, "int8 surgery")
VIT = ("fp16", "fp16 surgery", "fp16 folded", "int8", "int8 surgery", "int8 folded", "fp8")
LONG = (
    Goal(PLAIN, (*TORCH_BEST, *FLASH), "at least", 1.0),
)  # PyTorch's own choice is a flash kernel too; each row says which
LONG_PEERS = (*FP16_PEERS, *FLASH)

ROWS: tuple[Row, ...] = (
    Row(
        "resnet50_b1",
        "resnet50",
        image(1),
        ("fp16", "fp16 level 5", "int8", "int8 implicit", "tf32", "fp32"),
        18,
        ("traced fp16", *FLOAT_PEERS),
        {"fp32": 1.116, "tf32": 0.402, "fp16": 0.290, "int8": 0.235},
        (_faster(2.0, "compile fp16", ours=("fp16", "fp16 level 5")),),
    ),
    Row(
        "resnet50_b64",
        "resnet50",
        image(64),
        ("int8", "int8 modelopt", "int8 implicit", "fp16", "tf32", "fp32"),
        20,
        ("graph fp16", "compile fp16"),
        {"fp32": 12.42, "tf32": 3.23, "fp16": 1.744, "int8": 1.321, "int8 implicit": 1.278},
        (Goal(("int8", "int8 modelopt"), ("int8 implicit",), "at most", 1.02),),
    ),
    Row(
        "mobilenet_b1",
        "mobilenet_v2",
        image(1),
        ("fp16", "fp16 flags", "int8"),
        5,
        FLOAT_PEERS,
        {"fp16": 0.150},
        (_faster(2.0, "compile fp16"),),
    ),
    Row(
        "mobilenet_128",
        "mobilenet_v2",
        image(1, 128),
        ("fp32", "fp16"),
        4,
        ("eager fp32", "graph fp32"),
        gain=("eager fp32", "graph fp32", 3.25 / 1.11),
    ),
    Row(
        "vit_b1",
        "vit_b_16",
        image(1),
        VIT,
        11,
        FP16_PEERS,
        {"fp16": 0.524, "int8": 0.465, "fp8": 0.700},
        (_faster(1.25, *TORCH_BEST, ours=ANY),),
    ),
    Row(
        "vit_b32",
        "vit_b_16",
        image(32),
        VIT,
        11,
        FP16_PEERS,
        {"fp16": 3.11, "int8": 2.76, "fp8": 4.85},
        (_faster(1.2, *TORCH_BEST, ours=ANY),),
    ),
    Row(
        "swin_b8",
        "swin_t",
        image(8),
        ("fp16", "fp16 surgery", "int8", "int8 surgery"),
        8,
        ("graph fp16", "compile fp16"),
    ),
    _encoder(
        "encoder_b1",
        1,
        128,
        True,
        ("fp16", "fp16 surgery", "int8", "int8 surgery", "int8 modelopt", "fp8"),
        10,
        probe={"fp16": 0.439, "int8": 0.427, "fp8": 0.478},
        goals=(_faster(1.9, "compile fp16", ours=ANY),),
    ),
    _encoder(
        "encoder_b32",
        32,
        128,
        True,
        ("fp16", "fp16 surgery", "int8", "int8 surgery", "int8 modelopt", "fp8"),
        10,
        probe={"fp16": 1.85, "int8": 1.78, "fp8": 2.09},
        goals=(_faster(1.5, "compile fp16", ours=ANY),),
    ),
    _encoder("encoder_512", 1, 512, True, MASKED, 7, peers=LONG_PEERS, goals=LONG),
    _encoder("encoder_2048", 1, 2048, True, MASKED, 7, peers=LONG_PEERS, goals=LONG),
    _encoder(
        "encoder_maskless_b1",
        1,
        128,
        False,
        MASKED,
        6,
        goals=(_faster(1.9, "compile fp16", ours=ANY),),
    ),
    _encoder(
        "encoder_maskless_b32",
        32,
        128,
        False,
        MASKED,
        6,
        goals=(_faster(1.5, "compile fp16", ours=ANY),),
    ),
    _encoder("encoder_maskless_512", 1, 512, False, PLAIN, 5, peers=LONG_PEERS, goals=LONG),
    _encoder("encoder_maskless_2048", 1, 2048, False, PLAIN, 5, peers=LONG_PEERS, goals=LONG),
)
"""In the order of running: what the issue lists first goes first."""


def row_named(name: str) -> Row | None:
    return next((row for row in ROWS if row.name == name), None)


def setting_of(way: str, ways: Iterable[str]) -> str:
    """What a plan has to say for this way; "" for what Crucible does by default. `ways`: all that
    the row has.

    Attention is written plainly by default, so of a row with ways that do so (`surgery`) the others
    are not the default.
    """
    if setting := next((text for ending, text in SETTINGS.items() if way.endswith(ending)), ""):
        return setting
    return (
        AS_EXPORTED
        if any(each.endswith(SURGERY) for each in ways) and not way.endswith(SURGERY)
        else ""
    )


# -- what was reached --------------------------------------------------------

Entries = Mapping[str, Mapping[str, Any]]
"""The engines of a measured row by name: `ours fp16`, `bare fp16`, `loop fp16` (a bare loop on our
own engine), `torch eager fp16`.
"""


def device_ms(entries: Entries, name: str) -> float | None:
    """The median of the GPU's work; None for an engine that is missing or failed."""
    found: float | None = entries.get(name, {}).get("device_median_ms")
    return found


def targets(row: Row, entries: Entries, gpu: str) -> list[dict[str, Any]]:
    """Each target with what was found, the limit, and whether it was reached; `reached` is None
    where a figure is missing.
    """
    found = []
    for way in row.ways:
        ours, bare = device_ms(entries, f"ours {way}"), device_ms(entries, f"bare {way}")
        found.append(
            target(f"{way}: GPU time over that of a bare build", _over(ours, bare), "at most", BARE)
        )
        if (probed := row.probe.get(way)) and H200 in gpu:
            found.append(
                target(
                    f"{way}: GPU time over the probe's {probed:g} ms",
                    _over(ours, probed),
                    "at most",
                    PROBE,
                )
            )
    found += _session_targets(row, entries)
    found += [_goal(goal, entries) for goal in row.goals]
    if row.gain:
        slow, fast, least = row.gain
        value = _over(device_ms(entries, f"torch {slow}"), device_ms(entries, f"torch {fast}"))
        found.append(target(f"torch {slow} over torch {fast}", value, "at least", round(least, 3)))
    return found


def _session_targets(row: Row, entries: Entries) -> list[dict[str, Any]]:
    """Our session against a bare loop on the same engine file, of the one way that has such a
    loop.
    """
    way = next(
        (name.removeprefix("loop ") for name in entries if name.startswith("loop ")), row.ways[0]
    )
    ours, loop = entries.get(f"ours {way}", {}), entries.get(f"loop {way}", {})
    mine, theirs = device_ms(entries, f"ours {way}"), device_ms(entries, f"loop {way}")
    found = [
        target(
            f"{way}: GPU time over that of a bare loop on the same engine",
            _over(mine, theirs),
            "at most",
            SESSION,
        )
    ]
    walls = ours.get("wall_median_ms"), loop.get("wall_median_ms")
    if mine is not None and mine >= SHORT_MS:
        return [
            *found,
            target(
                f"{way}: bind to fetch over that of the bare loop",
                _over(*walls),
                "at most",
                SESSION,
            ),
        ]
    extra = None if None in walls else (walls[0] - walls[1]) * 1e3  # type: ignore[operator]
    return [
        *found,
        target(f"{way}: us more from bind to fetch than the bare loop", extra, "at most", EXTRA_US),
    ]


def _goal(goal: Goal, entries: Entries) -> dict[str, Any]:
    ours = _fastest(entries, [f"ours {way}" for way in goal.ours])
    theirs = _fastest(entries, _full(goal.theirs))
    pair = (theirs, ours) if goal.direction == "at least" else (ours, theirs)
    value = _over(*(device_ms(entries, name) if name else None for name in pair))
    return target(
        " over ".join(name or "nothing measured" for name in pair),
        value,
        goal.direction,
        goal.limit,
    )


def _full(names: tuple[str, ...]) -> list[str]:
    """`int8 implicit` is one of ours, all else is torch's."""
    return [f"ours {name}" if name in WAYS else f"torch {name}" for name in names]


def _fastest(entries: Entries, names: list[str]) -> str | None:
    known = [name for name in names if device_ms(entries, name) is not None]
    return min(known, key=lambda name: device_ms(entries, name) or 0.0, default=None)


def _over(value: float | None, other: float | None) -> float | None:
    return None if value is None or not other else value / other


def target(text: str, value: float | None, direction: Direction, limit: float) -> dict[str, Any]:
    reached = (
        None if value is None else value <= limit if direction == "at most" else value >= limit
    )
    return {
        "text": text,
        "value": value,
        "direction": direction,
        "limit": limit,
        "reached": reached,
    }


# -- as the command line and the results name them ----------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """A row or part, and some of its ways or variants; all of them where `words` is empty."""

    name: str
    words: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """`encoder_b1: fp16, int8`: names the row in the results and on pages."""
        return f"{self.name}: {', '.join(self.words)}" if self.words else self.name

    @property
    def names_ways(self) -> bool:
        """Whether `words` are ways of ours; else they select variants of a part."""
        return row_named(self.name) is not None or "throughput" in self.name


def choice_from_heading(text: str) -> Choice:
    """`encoder_b1: fp16, int8` -> the row encoder_b1 with two of its ways."""
    name, _, words = text.partition(":")
    return Choice(name.strip(), words_of(words))


def words_of(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
