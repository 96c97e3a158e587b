"""Decoding of random Llamas in bf16 on a GPU: transformers and ours, beside the GPU's memory.

A part is a model and a number of requests: `1b_b1`, `8b_b32`. All ways answer in turn, round after
round: a prompt of 128 tokens, and 128 new tokens. `next_ms` is the time between tokens, in the
median over rounds; `roofline_%` is the share of it that reading weights, keys and values would take
at the fastest read of memory in the same part. Of transformers, the GPU's clock counts. Of ours,
the time when the host has the token counts.

`kl` is the mean divergence from the scores of transformers eager, which reads the same text at
once, over the first 32 tokens of its answer. `equal` counts the tokens before the first other one:
random models have ties, so the divergence decides.

    python -m benchmarks language_gpu [--parts 1b_b1,8b_b1,...] [--ways WAY,WAY] [--rounds N]
                                      [--device cuda|cpu] [--tiny] [--limit SECONDS] [--into DIR]

`--tiny --device cpu` runs it all with small models, without CUDA graphs.
"""

from __future__ import annotations

import argparse
import gc
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import RESULTS, Cell, Row, argument_parser
from benchmarks.language.gpu_ways import (
    ONE_REQUEST,
    WAYS,
    Answers,
    Contestant,
    Model,
    eager_scores,
    random_model,
)
from benchmarks.language.random_llama import SHAPE
from benchmarks.limits.part_results import LimitReached, ended_after, measure_parts
from pipeline.llm.reference import Ids
from pipeline.llm.torch_engine.memory import BUFFER_BYTES, read_rate
from pipeline.measurement.clock import monotonic

NAME = "language_gpu"
BASELINE = "transformers eager"
CHECKED_TOKENS = 32
MAX_DIVERGENCE = 0.01
"""Nats per token. In a model of 8 layers, rounding of bf16 gives 0.0001, int8 0.001, and keys of
one layer in the wrong order 0.014.
"""

ROUGH = ("int4", "int4_sym", "fp8")
"""Their rounding alone exceeds the limit with random weights, so it proves nothing of them."""

MODELS: dict[str, dict[str, int]] = {
    "1b": {name: size for name, size in SHAPE.items() if not name.endswith("token_id")},
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "vocab_size": 128256,
    },
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 384,
}
PARTS = ("1b_b1", "8b_b1", "1b_b8", "8b_b8", "1b_b32", "8b_b32")
SHARES = {"1b_b1": 55.0, "8b_b1": 70.0}
"""Goals, percent of the roofline."""

OPEN_LIMIT_S = 90.0
RESERVE_S = 15.0
"""Kept of the time for the rounds."""

TINY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Setting:
    """What all parts share."""

    device: str
    tiny: bool
    ways: tuple[str, ...]
    rounds: int
    prompt_tokens: int
    output_tokens: int
    end_s: float  # by the clock


@dataclass(slots=True)
class Entrant:
    """A way in a race."""

    way: Contestant
    open_s: float
    kept_bytes: int
    peak_bytes: int = 0
    rounds: list[Answers] = field(default_factory=list)
    divergence: float | None = None
    largest: float | None = None


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("expected a GPU that torch can use, found none\n  next: --device cpu --tiny")
    setting = Setting(
        device=arguments.device,
        tiny=arguments.tiny,
        ways=arguments.ways,
        rounds=arguments.rounds,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        end_s=monotonic() + arguments.limit,
    )
    models, facts = dict[str, Model](), list[Row]()
    parts = {
        name: partial(without_gradients, name, setting, models, facts) for name in arguments.parts
    }
    run: Row = {
        "prompt_tokens": setting.prompt_tokens,
        "output_tokens": setting.output_tokens,
        "device": setting.device,
        "tiny": setting.tiny,
        "torch": torch.__version__,
    }
    measure_parts(NAME, parts, targets_of, arguments.into, arguments.limit, run, {"facts": facts})


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser(NAME, __doc__)
    parser.add_argument("--parts", type=partial(_known, PARTS), default=PARTS, metavar="PART,PART")
    parser.add_argument(
        "--ways", type=partial(_known, tuple(WAYS)), default=tuple(WAYS), metavar="WAY,WAY"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, to try it")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="[%(default)s]")
    parser.add_argument("--output-tokens", type=int, default=128, help="[%(default)s]")
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--limit", type=float, default=240.0, metavar="SECONDS", help="[240]")
    arguments = parser.parse_args(words)
    if arguments.rounds < 1 or min(arguments.prompt_tokens, arguments.output_tokens) < 2:
        parser.error("expected at least 1 round, and prompts and answers of at least 2 tokens")
    return arguments


def _known(names: Sequence[str], text: str) -> tuple[str, ...]:
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if unknown := [name for name in found if name not in names]:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(names)}, got '{unknown[0]}'")
    return found


# -- one part ----------------------------------------------------------------


def without_gradients(
    name: str, setting: Setting, models: dict[str, Model], facts: list[Row]
) -> list[Row]:
    with torch.no_grad():
        return measured(name, setting, models, facts)


def measured(name: str, setting: Setting, models: dict[str, Model], facts: list[Row]) -> list[Row]:
    """Race all ways of a part; those that fail are rows with the reason. What is not in a row goes
    to `facts`.
    """
    size, _, requests = name.partition("_b")
    sizes = TINY if setting.tiny else MODELS[size]
    if size not in models:
        models[size] = random_model(sizes, setting.device)
    model, drawn = models[size], np.random.default_rng(0)
    prompts = list(drawn.integers(3, sizes["vocab_size"], (int(requests), setting.prompt_tokens)))
    entrants, failures = opened(model, prompts, setting)
    check(model, prompts, entrants, failures, setting)
    rate = max(race(entrants, failures, prompts, setting))
    first = entrants[BASELINE].rounds[0].tokens if BASELINE in entrants else None
    facts[:] = [row for row in facts if row["part"] != name]
    rows = list[Row]()
    for way, entrant in entrants.items():
        equal = None if first is None else equal_tokens(first, entrant.rounds[0].tokens)
        rows.append({"way": way, **figures(entrant, model, prompts, rate, setting), "equal": equal})
        facts.append({"part": name, "way": way, **facts_of(entrant)})
    return rows + [{"way": way, "note": note} for way, note in failures.items()]


def opened(
    model: Model, prompts: Sequence[Ids], setting: Setting
) -> tuple[dict[str, Entrant], dict[str, str]]:
    """Open and warm up the ways in their order, as long as there is time."""
    entrants, failures = dict[str, Entrant](), dict[str, str]()
    context = setting.prompt_tokens + setting.output_tokens
    for way in (way for way in WAYS if way in setting.ways):
        if len(prompts) > 1 and way in ONE_REQUEST:
            continue
        if way.startswith(("ours fused", "ours overlapped")) and setting.device == "cpu":
            continue
        print(f"   opening {way}", file=sys.stderr, flush=True)
        begin, before = monotonic(), allocated(setting.device)
        with reasons(way, failures), limited(setting, OPEN_LIMIT_S):
            contestant = WAYS[way](model, context)
            for _ in range(2):  # the second one finds all that is compiled late
                contestant.answer(prompts, setting.output_tokens)
            kept = allocated(setting.device) - before
            entrants[way] = Entrant(contestant, monotonic() - begin, kept)
    return entrants, failures


@contextmanager
def reasons(way: str, failures: dict[str, str]) -> Iterator[None]:
    """Keep why a way failed. The others go on."""
    try:
        yield
    # the edge of a way: the next must run
    except (Exception, LimitReached) as error:  # noqa: BLE001
        traceback.print_exc()
        reason = str(error).strip().partition("\n")[0]
        failures[way] = f"{type(error).__name__}: {reason}"[:300]


@contextmanager
def limited(setting: Setting, most_s: float) -> Iterator[None]:
    """LimitReached after this time, or when only the time of the rounds is left."""
    with ended_after(min(most_s, setting.end_s - monotonic() - RESERVE_S)):
        yield


def check(
    model: Model,
    prompts: Sequence[Ids],
    entrants: dict[str, Entrant],
    failures: dict[str, str],
    setting: Setting,
) -> None:
    """Compare the scores of each way with those of transformers in one reading."""
    if BASELINE not in entrants:
        return
    print("   comparing scores", file=sys.stderr, flush=True)
    count = min(CHECKED_TOKENS, setting.output_tokens)
    following = entrants[BASELINE].way.answer(prompts, count).tokens
    wanted = eager_scores(model.module, prompts, following)
    for way in list(entrants):
        with reasons(way, failures):
            scores = entrants[way].way.scores(prompts, following)
            if scores is not None:
                entrants[way].divergence = divergence(wanted, scores)
                entrants[way].largest = float((wanted - scores).abs().max())
        if way in failures:
            del entrants[way]


def divergence(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Return the mean Kullback-Leibler divergence of scores, in nats per token."""
    wanted, got = wanted.log_softmax(-1), got.log_softmax(-1)
    return float((wanted.exp() * (wanted - got)).sum(-1).mean())


def race(
    entrants: dict[str, Entrant],
    failures: dict[str, str],
    prompts: Sequence[Ids],
    setting: Setting,
) -> list[float]:
    """Let all answer in turn; return how fast memory was read in each round, bytes per second."""
    buffer = torch.ones((TINY_BYTES if setting.tiny else BUFFER_BYTES) // 4, device=setting.device)
    rates, longest_s = [read_rate(buffer)], 0.0
    gc.collect()
    for _ in range(setting.rounds):
        begin = monotonic()
        if setting.end_s - begin < 2 * longest_s + 2:
            break
        for way in list(entrants):
            with reasons(way, failures):
                before = allocated(setting.device)
                reset_peak(setting.device)
                entrant = entrants[way]
                entrant.rounds.append(entrant.way.answer(prompts, setting.output_tokens))
                entrant.peak_bytes = max(entrant.peak_bytes, peak(setting.device) - before)
            if way in failures:
                del entrants[way]
        rates.append(read_rate(buffer))
        longest_s = max(longest_s, monotonic() - begin)
    for way in [way for way, entrant in entrants.items() if not entrant.rounds]:
        del entrants[way]
        failures[way] = "no time was left to measure it"
    return rates


# -- the device --------------------------------------------------------------


def allocated(device: str) -> int:
    return int(torch.cuda.memory_allocated()) if device == "cuda" else 0


def peak(device: str) -> int:
    return int(torch.cuda.max_memory_allocated()) if device == "cuda" else 0


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


# -- rows --------------------------------------------------------------------


def figures(
    entrant: Entrant, model: Model, prompts: Sequence[Ids], rate: float, setting: Setting
) -> dict[str, Cell]:
    """The times of one way, and its share of the roofline at this rate of reading."""
    times = np.array([answers.times_s for answers in entrant.rounds])  # [rounds, tokens]
    gaps_ms = 1e3 * np.diff(times, axis=1)
    next_ms = float(np.median(gaps_ms.mean(1)))
    p50_ms, p95_ms, p99_ms = (float(each) for each in np.percentile(gaps_ms, (50, 95, 99)))
    read_bytes = entrant.way.weight_bytes + cache_bytes(model, len(prompts), setting)
    return {
        "first_ms": 1e3 * float(np.median(times[:, 0])),
        "next_ms": next_ms,
        "p50_ms": p50_ms,
        "p95_ms": p95_ms,
        "p99_ms": p99_ms,
        "tokens_per_s": len(prompts) * times.shape[1] / float(np.median(times[:, -1])),
        "read_gb": read_bytes / 1e9,
        "memory_gb_per_s": rate / 1e9,
        "roofline_%": 100 * read_bytes / rate / (next_ms / 1e3),
        "kl": entrant.divergence,
    }


def facts_of(entrant: Entrant) -> dict[str, Cell]:
    """What else was measured of one way. `extra_gb` is its memory besides the weights in bf16."""
    rounds_ms = [1e3 * float(np.diff(answers.times_s).mean()) for answers in entrant.rounds]
    return {
        "rounds": len(rounds_ms),
        "fastest_next_ms": min(rounds_ms),
        "slowest_next_ms": max(rounds_ms),
        "largest_difference": entrant.largest,
        "extra_gb": (entrant.kept_bytes + entrant.peak_bytes) / 1e9,
        "open_s": entrant.open_s,
    }


def cache_bytes(model: Model, requests: int, setting: Setting) -> int:
    """Return the bytes of keys and values at half of an answer."""
    tokens = setting.prompt_tokens + setting.output_tokens // 2
    return requests * tokens * model.network("bf16").cache_bytes_per_token


def equal_tokens(wanted: NDArray[np.int64], got: NDArray[np.int64]) -> int:
    """Return how many tokens of the first request are equal before one differs."""
    differing = np.flatnonzero(wanted[0] != got[0])
    return int(differing[0]) if differing.size else int(wanted.shape[1])


def targets_of(rows: Sequence[Row]) -> Mapping[str, bool]:
    """The goals of each part, with what was reached."""
    found = dict[str, bool]()
    measured_rows = [row for row in rows if row.get("next_ms") is not None]
    for part, least in SHARES.items():
        shares = {
            str(row["way"]): float(row["roofline_%"] or 0)
            for row in measured_rows
            if row["part"] == part and str(row["way"]).startswith("ours")
        }
        quantised = ("int8", "int4", "int4_sym", "fp8")
        in_bf16 = {way: share for way, share in shares.items() if not way.endswith(quantised)}
        if in_bf16:
            best = max(in_bf16, key=in_bf16.__getitem__)
            goal = f"{part}: at least {least:g} % of the roofline"
            found[f"{goal} ({best}: {in_bf16[best]:.1f} %)"] = in_bf16[best] >= least
    for row in measured_rows:
        if row["kl"] is not None and not str(row["way"]).endswith(ROUGH):
            goal = f"{row['part']} {row['way']}: divergence of at most {MAX_DIVERGENCE:g} nats"
            found[f"{goal} ({row['kl']:.2g})"] = float(row["kl"]) <= MAX_DIVERGENCE
    return found
