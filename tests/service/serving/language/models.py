"""An engine of a small random Llama, its report, and deployments of it."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from pipeline.core.artifacts import Target
from pipeline.execution.store import Key, Store
from pipeline.host.environment import environment
from pipeline.llm.engine import MODEL_FILE, SETTINGS_FILE, LanguageEngine, LanguageSettings
from pipeline.llm.libraries.registry import library_of
from pipeline.llm.plan import (
    Device,
    LanguageCandidate,
    LanguagePlan,
    language_plan_from_document,
)
from pipeline.llm.results import LanguageReport, LanguageResult
from pipeline.llm.source import Description, describe, find_source
from pipeline.report.bundle import deliver_engine
from pipeline.report.files import HTML_NAME, JSON_NAME, MARKDOWN_NAME
from pipeline.results.report import Verdict
from service.auth import LOCAL
from service.devices.leases import utc_now
from service.jobs.state import Started, Succeeded
from service.jobs.store import JobStore
from service.language.generation import GenerateRequest, Part, Sampling
from service.registry.models import DeploymentOptions, LanguageSize, Version
from service.registry.promotion import NO_ROWS
from service.serving.language.answer import RunningAnswer
from service.serving.language.client import WORKER
from service.serving.language.deployment import LanguageDeployment, LanguageSpec
from service.serving.language.stats import LanguageFigures
from service.storage.layout import Folders
from tests.pipeline.llm.models import language_plan, write_model
from tests.service.builders.jobs import WITHIN_S, new_job
from tests.service.serving.engines import processes_of

CONTEXT, VOCABULARY, CACHE_VALUES = 256, 384, 128
MODEL = f"l{os.getpid()}"  # tests may run twice on one machine, and look for what is left of theirs
EXACT = LanguageCandidate(weights="fp16", kv_cache="f32", arithmetic="f32")
PROMPT = "Once upon a time there was a small house in the wood"


@dataclass(frozen=True, slots=True)
class Tiny:
    """A compiled random model, as the pipeline leaves it."""

    engine: LanguageEngine
    about: Description
    plan: LanguagePlan


def tiny_model(
    folder: Path,
    scale: float = 0.2,
    recipe: LanguageCandidate = EXACT,
    device: Device = "cpu",
) -> Tiny:
    """Build the engine of a random Llama; it has a manifest, as it comes from a store."""
    library = library_of(recipe.library)
    model = write_model(folder / "model", scale=scale)
    source = find_source(str(model))
    about = describe(source, CONTEXT)
    (folder / "exported").mkdir()
    exported = library.export(source, about, device, folder / "exported")

    def make(out: Path) -> LanguageEngine:
        return library.build(exported, recipe, source, None, out)

    key = Key("weights", 1, (source.digest,))
    engine = Store(folder / "store").get(key, LanguageEngine, make).value
    plan = language_plan_from_document(language_plan(folder, model), folder, "tiny")
    return Tiny(engine, about, plan)


def paper_model(folder: Path) -> Tiny:
    """The same as files that nothing can load: it needs no library."""
    about = Description(
        architecture="llama",
        parameters=1,
        layers=1,
        hidden=64,
        cache_values_per_token=CACHE_VALUES,
        vocabulary=VOCABULARY,
        context=CONTEXT,
        window=None,
        stored_as="float32",
        stored_bits=32,
    )
    settings = LanguageSettings(
        end_tokens=(2,),
        special_tokens={"eos_token": "</s>"},
        chat_template="{{ messages }}",
        context=CONTEXT,
        vocabulary=VOCABULARY,
        cache_values_per_token=CACHE_VALUES,
    )

    def make(out: Path) -> LanguageEngine:
        (out / MODEL_FILE).write_text("a graph")
        (out / SETTINGS_FILE).write_text(settings.model_dump_json())
        return LanguageEngine(
            root=out,
            file=MODEL_FILE,
            library="openvino_genai",
            recipe=EXACT,
            target=Target(backend="openvino", version="1", device="a CPU"),
            weight_bytes=1,
        )

    engine = Store(folder / "store").get(Key("weights", 1, ("paper",)), LanguageEngine, make).value
    plan = language_plan_from_document(language_plan(folder, "model.gguf"), folder, "tiny")
    return Tiny(engine, about, plan)


def write_report(out: Path, tiny: Tiny, verdict: Verdict = "accepted") -> LanguageReport:
    """A report in `out`, as a job leaves it; with the engine, if the verdict allows one."""
    has_engine = verdict in ("accepted", "unproven")
    report = LanguageReport(
        name="tiny",
        created="2026-01-01T00:00:00+00:00",
        command="crucible compile plan.yaml",
        plan=tiny.plan,
        model=tiny.about,
        environment=environment(),
        reference_perplexity=100.0,
        verdict=verdict,
        headline="It is right.",
        winner=tiny.engine.label if has_engine else "",
        reasons=("because",),
        candidates=(LanguageResult(label=tiny.engine.label),),
        delivered=tiny.engine if has_engine else None,
    )
    out.mkdir(parents=True)
    if has_engine:
        deliver_engine(tiny.engine, out / "engine")
    for name in (MARKDOWN_NAME, HTML_NAME):
        (out / name).write_text("a report")
    (out / JSON_NAME).write_text(report.model_dump_json(indent=1))
    return report


def ended_language_job(
    folders: Folders, jobs: JobStore, tiny: Tiny, verdict: Verdict = "accepted"
) -> str:
    """The id of a job of the local owner that has ended with such a report."""
    job = new_job(folders, "tiny").model_copy(update={"owner": "local"})
    jobs.add(job, utc_now())
    jobs.append(job.id, Started(1, 1.0), utc_now())
    jobs.append(job.id, Succeeded(verdict, "w"), utc_now())
    write_report(folders.report(job.id), tiny, verdict)
    return job.id


def language_version(tiny: Tiny, model: str = MODEL) -> Version:
    """The first version of a model, as its promotion would describe it."""
    return Version(
        model=model,
        version=1,
        owner="local",
        job="job",
        created="2026-01-01T00:00:00.000+00:00",
        verdict="accepted",
        override=False,
        before=None,
        label=tiny.engine.label,
        backend=tiny.engine.library,
        precision=tiny.engine.precision,
        target=tiny.engine.target.device,
        on_gpu=tiny.engine.is_on_gpu,
        size_bytes=500_000,
        inputs=(),
        outputs=(),
        profiles=(),
        batch=NO_ROWS,
        language=LanguageSize(
            context=CONTEXT, vocabulary=VOCABULARY, cache_bytes_per_token=4.0 * CACHE_VALUES
        ),
    )


class Bench:
    """A deployment, and what stands beside it."""

    def __init__(self, deployment: LanguageDeployment, registry: CollectorRegistry) -> None:
        self.deployment, self.registry = deployment, registry

    def value(self, metric: str, **labels: str) -> float:
        found = self.registry.get_sample_value(
            f"crucible_language_{metric}",
            {"model": self.deployment.model, "version": "1", **labels},
        )
        return found or 0.0

    async def ask(self, prompt: str | tuple[int, ...] = PROMPT, **more: Any) -> list[Part]:
        """All parts of an answer. Fields of Sampling and of the request are in `more`."""
        async with self.deployment.generate(asking(prompt, **more)) as answer:
            return [part async for part in answer]

    async def ask_alone_and_together(
        self, prompts: Sequence[str | tuple[int, ...]], **more: Any
    ) -> tuple[list[list[Part]], list[list[Part]]]:
        """The answers to these prompts, first one after another, then all at once."""
        alone = [await self.ask(each, **more) for each in prompts]
        return alone, await asyncio.gather(*(self.ask(each, **more) for each in prompts))


def asking(prompt: str | tuple[int, ...] = PROMPT, model: str | None = None, **more: Any) -> Any:
    """A request; `more` are fields of it and of its Sampling."""
    of_sampling = {name: more.pop(name) for name in Sampling.__slots__ if name in more}
    return GenerateRequest(LOCAL, model, prompt, Sampling(**of_sampling), **more)


def text_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts)


def ids_of(parts: Sequence[Part]) -> list[int]:
    return [token.id for part in parts for token in part.tokens]


def log_probs_of(parts: Sequence[Part]) -> list[float | None]:
    return [token.log_prob for part in parts for token in part.tokens]


async def first_part(answer: RunningAnswer) -> Part:
    """The first part of an answer, which goes on."""
    return await anext(aiter(answer))


async def until(reached: Callable[[], object]) -> None:
    end = time.monotonic() + WITHIN_S
    while not reached():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


@asynccontextmanager
async def deployed(
    folder: Path,
    tiny: Tiny,
    command: Sequence[str] = WORKER,
    load_s: float = 180.0,
    stuck_s: float = 120.0,
    **options: Any,
) -> AsyncIterator[Bench]:
    """Loaded and ready; closed at the end, and then no process and no file of it is left."""
    registry = CollectorRegistry()
    spec = LanguageSpec(
        language_version(tiny),
        tiny.engine,
        DeploymentOptions(**options),
        ("gpu:0" if tiny.engine.is_on_gpu else "cpu",),
        load_s,
        stuck_s=stuck_s,
    )
    work = folder / f"work-{uuid.uuid4().hex}"
    figures = LanguageFigures(registry)
    deployment = await LanguageDeployment.start(spec, work, figures, command)
    try:
        yield Bench(deployment, registry)
    finally:
        await deployment.close()
        assert not work.exists()
        assert processes_of(f"serve-{MODEL}-") == []
