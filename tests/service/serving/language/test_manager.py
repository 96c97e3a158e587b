"""Language models from the report to the answer, beside models with inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import CrucibleError
from service.auth import LOCAL, Caller
from service.registry.models import DeploymentOptions, PromoteRequest
from tests.service.serving.engines import play
from tests.service.serving.language.models import (
    CONTEXT,
    PROMPT,
    VOCABULARY,
    Tiny,
    asking,
    ended_language_job,
    ids_of,
    text_of,
)
from tests.service.serving.models import Shelf, shelf

STRANGER = Caller("stranger", ("infer",))
SHORT = DeploymentOptions(cache_tokens=1024)


async def promote(
    here: Shelf, tiny: Tiny, name: str = "tiny", override: bool = False, verdict: str = "accepted"
) -> int:
    job = ended_language_job(here.folders, here.jobs, tiny, verdict)  # type: ignore[arg-type]
    request = PromoteRequest(report=job, override=override)
    return (await here.deployments.promote(LOCAL, name, request)).current.version


async def refused(of: type[CrucibleError], call: object) -> str:
    with pytest.raises(of) as error:
        await call  # type: ignore[misc]
    return error.value.message


async def ask(here: Shelf, model: str | None = None, **more: object) -> tuple[int, str]:
    """The version that answers, and its text."""
    async with here.deployments.generate(asking(PROMPT, model, **more)) as answer:
        parts = [part async for part in answer]
        assert answer.completion_tokens == len(ids_of(parts))
        return answer.version, text_of(parts)


def test_a_report_becomes_a_version_that_answers(tmp_path: Path, tiny: Tiny) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            assert await promote(here, tiny) == 1
            await here.deployments.deploy(LOCAL, "tiny", SHORT)
            (served,) = here.deployments.languages(LOCAL)
            assert served == here.deployments.find_language(LOCAL, None)
            assert (served.model, served.version, served.state) == ("tiny", 1, "ready")
            assert (served.context, served.vocabulary) == (CONTEXT, VOCABULARY)
            assert served.label == tiny.engine.label
            assert dict(served.special_tokens)["eos_token"] == "</s>"
            assert served.devices[0].memory_bytes > 0
            version, text = await ask(here, max_tokens=8)
            assert version == 1
            assert text
            statistics = here.deployments.statistics(LOCAL)[0]
            assert (statistics.succeeded.count, statistics.rows) == (1, 8)
            await here.deployments.unload(LOCAL, "tiny")
            assert here.deployments.languages(LOCAL) == ()

    play(story)
