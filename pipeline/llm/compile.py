"""Compile a language model: export, build, score, race, prove, decide."""

from __future__ import annotations

import datetime as dt
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pipeline.core.artifacts import Artifact, Target
from pipeline.core.progress import CandidateFigures
from pipeline.errors import BackendUnavailable, ChildDied, ChildStopped, UserError
from pipeline.execution.stage_runner import Runner, Stage, StageCall
from pipeline.host.environment import environment
from pipeline.llm.engine import ExportedModel, LanguageEngine
from pipeline.llm.gate import Judged, judge, percent_text
from pipeline.llm.libraries.registry import library_of
from pipeline.llm.plan import (
    LIBRARIES_ON,
    Device,
    Goodput,
    LanguageCandidate,
    LanguageObjective,
    LanguagePlan,
    LibraryName,
)
from pipeline.llm.reference import Reference, refer
from pipeline.llm.results import LanguageReport, LanguageResult
from pipeline.llm.scoring import Scores, score
from pipeline.llm.served import Room
from pipeline.llm.source import Description, Source, describe, find_source
from pipeline.llm.speed.race import Race, measure
from pipeline.llm.speed.times import AnswerTimes
from pipeline.llm.texts import (
    Documents,
    TokenCounts,
    check_prompts,
    check_texts,
    count_tokens,
    read_texts,
)
from pipeline.measurement.comparison import processes_from_samples
from pipeline.results.report import Verdict

PACKAGES = ("torch", "transformers")
OPTIONAL: tuple[LibraryName, ...] = ("onnxruntime_genai",)  # of plans without candidates
TOOLS = (
    "torch",
    "transformers",
    "tokenizers",
    "gguf",
    "openvino",
    "openvino-genai",
    "openvino-tokenizers",
    "nncf",
    "safetensors",
    "triton",
    "onnxruntime",
    "onnxruntime-genai",
    "onnx-ir",
)
DESCRIBE = Stage("describe", 1, ("gguf",), writes_files=False)
COUNT = Stage("count tokens", 1, ("transformers", "tokenizers", "gguf"), writes_files=False)
EXPORT = Stage("export_language_model", 3, TOOLS)
REFER = Stage("reference", 2, ("torch", "transformers", "tokenizers", "gguf"))
BUILD = Stage("weights", 3, TOOLS)
SCORE = Stage("score", 4, ("openvino", "openvino-genai", "torch", "triton"), writes_files=False)
RACE = Stage("race", 2, writes_files=False, needs_quiet_device=True)
STAGES = (DESCRIBE, COUNT, EXPORT, REFER, BUILD, SCORE, RACE)


@dataclass(frozen=True, slots=True)
class Compile:
    """One compile: what its steps share."""

    plan: LanguagePlan
    runner: Runner
    source: Source
    about: Description
    room: Room
    exported: dict[LibraryName, ExportedModel] = field(default_factory=dict)
    targets: dict[LibraryName, Target] = field(default_factory=dict)
    missing: dict[LibraryName, str] = field(default_factory=dict)  # why a library is not here
    calibration: Documents | None = None

    def refer(self, documents: Documents) -> Reference:
        plan = self.plan
        work = partial(refer, self.source, documents, plan.texts.max_tokens, plan.device)
        call = StageCall(
            REFER, Reference, work, subject=documents.name, depends_on=(documents.name,)
        )
        return self.runner.stage(call)

    def check_lengths(self, *sets: Documents) -> None:
        """DataError and PlanError if texts are too short for the plan."""
        work = partial(count_tokens, self.source, sets, self.plan.texts.max_tokens)
        found = self.runner.stage(StageCall(COUNT, TokenCounts, work))
        for documents, counts in zip(sets, found.counts, strict=True):
            check_texts(documents.name, counts, self.plan)
            if documents.name == "selection":
                check_prompts(counts, self.plan)

    def build(self, recipe: LanguageCandidate) -> LanguageEngine:
        data = self.calibration if recipe.awq or recipe.scale_estimation else None
        name = recipe.library
        work = partial(library_of(name).build, self.exported[name], recipe, self.source, data)
        target = self.targets[name]
        call = StageCall(BUILD, LanguageEngine, work, subject=recipe.label, target=target)
        return self.runner.stage(call)

    def score(self, engine: LanguageEngine, reference: Reference) -> Scores:
        work = partial(score, engine, reference, self.plan.texts.cached_tokens, self.room)
        subject = f"{engine.label}, {reference.name}"
        return self.runner.stage(
            StageCall(SCORE, Scores, work, subject=subject, target=engine.target)
        )

    def race(self, engines: Mapping[str, LanguageEngine], reference: Reference) -> Race:
        """Time engines by their names in the results. The first one is the baseline."""
        plan = self.plan
        for name, engine in engines.items():
            if engine.recipe is None:
                figures = CandidateFigures(name, engine.precision, is_baseline=True)
                self.runner.report(RACE, figures)
        arguments = (engines, self.source, reference, plan.benchmark, plan.objective, self.room)
        result: Race = self.runner.anew(RACE, "", measure, *arguments)
        return result


def compile_language_model(plan: LanguagePlan, runner: Runner, command: str) -> LanguageReport:
    """Build, score and time the candidates of a plan, and decide.

    PlanError, ModelError, DataError and HostError for what makes all of it impossible. A candidate
    that fails is in the report with its reason.
    """
    targets, missing = available(libraries_of(plan), plan.device)
    names = tuple(targets)
    source = find_source(plan.language_model.path)
    calibration, selection, validation = read_texts(plan.texts)
    about = runner.stage(StageCall(DESCRIBE, Description, partial(describe, source, plan.context)))
    room = room_of(plan, about)
    run = Compile(plan, runner, source, about, room, {}, targets, missing, calibration)
    run.check_lengths(selection, validation)
    for name in names:
        work = partial(library_of(name).export, source, about, plan.device)
        call = StageCall(EXPORT, ExportedModel, work, subject=name, target=targets[name])
        run.exported[name] = runner.stage(call)
    reference = run.refer(selection)
    results, engines = list[LanguageResult](), dict[str, LanguageEngine]()
    candidates = plan.candidates or tuple(
        recipe
        for name in names
        for recipe in library_of(name).default_candidates(about, source, plan)
    )
    for recipe in candidates:
        result, engine = _prepared(run, recipe, reference)
        results.append(result)
        if engine is not None:
            engines[result.label] = engine
    passing = [each for each in results if each.judged and each.judged.passed]
    baseline, rows, load = None, tuple[AnswerTimes, ...](), 0.0
    if passing:
        entrants = [in_transformers(run.exported[names[0]], targets[names[0]])]
        entrants += [engines[each.label] for each in passing]
        timed = run.race({each.label: each for each in entrants}, reference)
        baseline, *others = timed.rows
        rows, load = tuple(others), timed.load_1min
    times = {row.label: row for row in rows}
    results = [each.model_copy(update={"times": times.get(each.label)}) for each in results]
    fastest = best_of(rows, plan.objective)
    judged = None
    if fastest is not None:
        proof = run.score(engines[fastest.label], run.refer(validation))
        judged = judge(proof, plan.accuracy)
    decided = decide(baseline, fastest, judged, results, plan.objective)
    return LanguageReport(
        name=plan.name,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        command=command,
        plan=plan,
        source_digest=source.digest,
        model=about,
        environment=environment(),
        reference_perplexity=reference.perplexity,
        verdict=decided.verdict,
        headline=decided.headline,
        winner=decided.winner,
        reasons=decided.reasons,
        next_steps=decided.next_steps,
        notes=_notes(about, plan, reference),
        candidates=tuple(results),
        baseline=baseline,
        load_1min=load,
        validation=judged,
        delivered=engines.get(decided.winner),
        steps=tuple(runner.steps),
    )


def room_of(plan: LanguagePlan, about: Description) -> Room:
    """Return what an engine is opened with room for."""
    return Room(
        context=plan.context,
        cache_values_per_token=about.cache_values_per_token,
        threads=plan.benchmark.threads,
        requests=max(plan.benchmark.concurrency),
    )


def libraries_of(plan: LanguagePlan) -> tuple[LibraryName, ...]:
    """Return the libraries of the candidates; of a plan without any, the first one of the device,
    and those beside it that are installed.
    """
    names = dict.fromkeys(candidate.library for candidate in plan.candidates)
    first, *others = LIBRARIES_ON[plan.device]
    beside = [name for name in others if name in OPTIONAL and not missing_packages(name)]
    return tuple(names) or (first, *beside)


def available(
    names: Sequence[LibraryName], device: Device
) -> tuple[dict[LibraryName, Target], dict[LibraryName, str]]:
    """Return the targets of the libraries that are here, and why others are not.

    BackendUnavailable if none is.
    """
    targets, missing = dict[LibraryName, Target](), dict[LibraryName, BackendUnavailable]()
    for name in names:
        try:
            check_packages((name,))
            targets[name] = library_of(name).target(device)
        except BackendUnavailable as error:
            missing[name] = error
    if not targets:
        raise next(iter(missing.values()))
    reasons = {name: f"{error.message}: {error.next_step}" for name, error in missing.items()}
    return targets, reasons


def check_packages(names: Sequence[LibraryName] = ("openvino_genai",)) -> None:
    """BackendUnavailable if a package is missing that these libraries need."""
    for name in names:
        if missing := missing_packages(name):
            raise BackendUnavailable(
                f"a language model needs packages that are not installed: {', '.join(missing)}",
                library_of(name).INSTALL,
            )


def missing_packages(name: LibraryName) -> list[str]:
    needed = (*PACKAGES, *library_of(name).PACKAGES)
    return [package for package in needed if importlib.util.find_spec(package) is None]


def _prepared(
    run: Compile, recipe: LanguageCandidate, reference: Reference
) -> tuple[LanguageResult, LanguageEngine | None]:
    if reason := run.missing.get(recipe.library):
        return LanguageResult(label=recipe.label, failure=reason), None
    try:
        engine = run.build(recipe)
        scores = run.score(engine, reference)
    except (UserError, ChildDied) as error:
        if isinstance(error, ChildStopped):
            raise
        return LanguageResult(label=recipe.label, failure=error.message), None
    judged = judge(scores, run.plan.accuracy)
    figures = CandidateFigures(engine.label, engine.precision, accuracy=judged.figures)
    run.runner.report(SCORE, figures, recipe.label)
    result = LanguageResult(
        label=recipe.label,
        weight_bytes=engine.weight_bytes,
        facts=scores.facts,
        judged=judged,
    )
    return result, engine


def in_transformers(beside: Artifact, here: Target) -> LanguageEngine:
    """Return the baseline. Its folder, that of another artifact, is not read."""
    return LanguageEngine(
        root=beside.root,
        file=beside.file,
        library="transformers",
        recipe=None,
        target=here,
        weight_bytes=0,
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict and what explains it."""

    verdict: Verdict
    headline: str
    winner: str = ""
    reasons: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()


def decide(
    baseline: AnswerTimes | None,
    fastest: AnswerTimes | None,
    judged: Judged | None,
    results: Sequence[LanguageResult],
    objective: LanguageObjective = "latency",
) -> Decision:
    """Decide by the winner's ratio and by its scores on the validation set."""
    if baseline is None or fastest is None or judged is None:
        return _without_winner(results)
    limits = objective if isinstance(objective, Goodput) else None
    if not judged.passed:
        return Decision(
            "rejected",
            f"{fastest.label} was within the limits on the selection set, and is not on the"
            " validation set.",
            reasons=judged.failures,
            next_steps=("give a larger selection set, or raise the limits",),
        )
    costs = f"its perplexity changes by {percent_text(judged.worst_increase)}"
    if limits and baseline.levels and not baseline.goodput_per_s:
        headline = (
            f"{fastest.label} gives {fastest.goodput_per_s:.3g} answers/s within"
            f" {limits_text(limits)}, {baseline.label} gives none, and {costs}."
        )
        return Decision("accepted", headline, fastest.label)
    if fastest.ratio is None:
        return Decision(
            "unproven",
            f"{fastest.label} is right, and {costs}. How fast it is could not be measured.",
            fastest.label,
            reasons=(fastest.ratio_missing or f"the baseline failed: {baseline.failure}",),
            next_steps=("compile again when this host is quiet: only the race runs again",)
            if fastest.ratio_missing
            else (),
        )
    ratio = fastest.ratio
    times = f"{ratio.value:.2f} times (95 %: {ratio.low:.2f} to {ratio.high:.2f})"
    if limits:
        speed = f"gives {times} as many answers within {limits_text(limits)}"
    else:
        speed = f"answers {times} as fast"
    if ratio.low > 1:
        headline = f"{fastest.label} {speed} as {baseline.label}, and {costs}."
        return Decision("accepted", headline, fastest.label)
    verdict: Verdict = "keep" if ratio.high < 1 else "unproven"
    return Decision(
        verdict,
        f"Nothing is measurably better than {baseline.label}: {fastest.label} {speed}.",
        fastest.label if verdict == "unproven" else "",
        next_steps=("raise benchmark.budget_s",) if verdict == "unproven" else (),
    )


def limits_text(limits: Goodput) -> str:
    return (
        f"{limits.max_first_token_s:g} s to the first token and {limits.max_next_token_s:g} s"
        " between tokens"
    )


def best_of(rows: Sequence[AnswerTimes], objective: LanguageObjective) -> AnswerTimes | None:
    """Return the best engine by the objective; None if none was timed, or none is within the
    limits.
    """
    if not isinstance(objective, Goodput):
        return fastest_of(rows)
    best = max(rows, key=lambda row: row.goodput_per_s, default=None)
    return best if best and best.goodput_per_s else None


def fastest_of(rows: Sequence[AnswerTimes]) -> AnswerTimes | None:
    """Return the engine whose undisturbed processes were fastest; None if none was timed."""
    timed = [(row, row.answer) for row in rows if row.answer is not None]
    levels = [(processes_from_samples(answer).level_s, row.label) for row, answer in timed]
    label = min(levels)[1] if levels else ""
    return next((row for row, _ in timed if row.label == label), None)


def _without_winner(results: Sequence[LanguageResult]) -> Decision:
    """Say why there is no engine: none was built, none is right, or none could be timed."""
    reasons = tuple(f"{each.label}: {_why(each)}" for each in results)
    if all(each.judged is None for each in results):
        return Decision("rejected", "No candidate could be built.", reasons=reasons)
    if any(each.times and each.times.levels for each in results):
        return Decision(
            "rejected",
            "No answer of any candidate is within the limits of the objective.",
            reasons=reasons,
            next_steps=("raise the limits of `objective`, or lower `benchmark.concurrency`",),
        )
    if any(each.judged and each.judged.passed for each in results):
        headline = "Candidates are within the limits of the accuracy, and none could be timed."
        return Decision("rejected", headline, reasons=reasons)
    return Decision(
        "rejected",
        "No candidate is within the limits of the accuracy.",
        reasons=reasons,
        next_steps=("raise the limits of `accuracy`, or try `effort: high`",),
    )


def _why(result: LanguageResult) -> str:
    if result.failure:
        return result.failure
    if result.judged and result.judged.failures:
        return result.judged.failures[0]
    if result.times is None:
        return "not timed"
    return result.times.failure or "no answer is within the limits of the objective"


def _notes(about: Description, plan: LanguagePlan, reference: Reference) -> tuple[str, ...]:
    notes = []
    if about.is_quantised:
        notes.append(
            f"The weights came with {about.stored_bits} bits ({about.stored_as}). What int4 costs"
            " here says little about int4 of the model as it was trained."
        )
    if reference.device != plan.device:
        notes.append(
            "The reference in fp32 was computed on the CPU: the GPU's free memory was too small."
        )
    return tuple(notes)
