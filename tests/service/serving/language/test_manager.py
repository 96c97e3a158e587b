"""Language models from the report to the answer, beside models with inputs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pipeline.errors import CrucibleError, DamagedError
from service.auth import LOCAL, Caller
from service.errors import Conflict, NotFound, Unavailable, Unprocessable
from service.inference import InferRequest
from service.registry.models import DeploymentOptions, PromoteRequest
from service.serving.language.client import WORKER
from service.serving.language.deployment import LanguageDeployment, LanguageSpec
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
    until,
)
from tests.service.serving.models import Host, Shelf, shelf

DOUBLE = str(Path(__file__).with_name("worker_double.py"))
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


def test_verdicts_decide_as_for_engines(tmp_path: Path, tiny: Tiny) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            for verdict, override in (("rejected", True), ("keep", True), ("unproven", False)):
                message = await refused(Conflict, promote(here, tiny, "m", override, verdict))
                assert f"verdict is {verdict}" in message
            assert await promote(here, tiny, "m", True, "unproven") == 1
            (model,) = (await here.deployments.views(LOCAL)).models
            assert (model.current.override, model.current.inputs) == (True, ())
            assert model.current.language is not None
            assert here.host.proofs == []

    play(story)


def test_each_kind_of_model_refuses_requests_of_the_other(tmp_path: Path, tiny: Tiny) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            assert await refused(NotFound, ask(here)) == "no model is deployed"
            await promote(here, tiny)
            await here.promote("m")
            await here.deployments.deploy(LOCAL, "tiny", SHORT)
            await here.deployments.deploy(LOCAL, "m", DeploymentOptions())
            deployments = here.deployments
            with pytest.raises(Unprocessable, match="is a language model") as error:
                await deployments.infer(InferRequest(LOCAL, "tiny", {}))
            assert "/v1/completions" in error.value.next_step
            with pytest.raises(Unprocessable, match="is a language model"):
                deployments.find(LOCAL, "tiny")
            with pytest.raises(Unprocessable, match="'m' is no language model"):
                deployments.find_language(LOCAL, "m")
            assert "'m' is no language model" in await refused(Unprocessable, ask(here, "m"))
            # without a name, each request finds the only model of its kind
            assert await here.ask(None) == 1
            assert (await ask(here, max_tokens=2))[0] == 1
            assert [each.model for each in deployments.served(LOCAL)] == ["m", "tiny"]
            assert [each.model for each in deployments.languages(LOCAL)] == ["tiny"]
            assert deployments.languages(STRANGER) == ()
            with pytest.raises(NotFound):
                deployments.find_language(STRANGER, "tiny")
            with pytest.raises(NotFound, match="version 2 of 'tiny' is not deployed"):
                deployments.find_language(LOCAL, "tiny", 2)
            assert (await deployments.load(LOCAL, "tiny")).model == "tiny"

    play(story)


def test_answers_go_on_while_versions_change(tmp_path: Path, tiny: Tiny) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            await promote(here, tiny)
            await here.deployments.deploy(LOCAL, "tiny", SHORT)
            whole = (await ask(here, max_tokens=200))[1]
            for change, versions in (
                (promote(here, tiny), (1, 2)),
                (here.deployments.rollback(LOCAL, "tiny"), (2, 1)),
            ):
                task = asyncio.ensure_future(change)
                answered = []
                while not task.done():
                    answered.append(await ask(here, max_tokens=200))
                await task
                answered.append(await ask(here, max_tokens=200))
                assert {text for _, text in answered} == {whole}
                numbers = [number for number, _ in answered]
                assert sorted(numbers, reverse=versions[0] > versions[1]) == numbers
                assert (numbers[0], numbers[-1]) == versions
            view = await here.deployments.view(LOCAL, "tiny")
            assert [each.version for each in view.versions] == [2, 1]

    play(story)


class Lingering(Host):
    """Its first version answers as long as the test wants."""

    async def start_language(self, spec: LanguageSpec, work: Path) -> LanguageDeployment:
        command = WORKER if spec.version.version > 1 else (sys.executable, DOUBLE, "linger")
        return await LanguageDeployment.start(spec, work, self.language_figures, command)


@asynccontextmanager
async def replacing(here: Shelf, tiny: Tiny) -> AsyncIterator[asyncio.Future[int]]:
    """While a second version answers, and an answer of the first one holds up all that it has."""
    async with here.deployments.generate(asking(max_tokens=9)) as other:
        await anext(aiter(other))
        change = asyncio.ensure_future(promote(here, tiny))
        await until(lambda: here.deployments.find_language(LOCAL, "tiny").version == 2)
        yield change


def test_an_answer_streams_on_while_its_version_is_replaced(tmp_path: Path, tiny: Tiny) -> None:
    async def story() -> None:
        async with shelf(tmp_path, Lingering()) as here:
            await promote(here, tiny)
            await here.deployments.deploy(LOCAL, "tiny", SHORT)
            async with here.deployments.generate(asking(max_tokens=9)) as answer:
                parts = [await anext(aiter(answer))]
                async with replacing(here, tiny) as change:
                    assert (await ask(here, max_tokens=4))[0] == 2, "new requests do not wait"
                    assert not change.done()
                parts += [part async for part in answer]  # which goes on now
                assert (text_of(parts), parts[-1].finish) == ("abcabc", "length")
                assert (answer.version, await change) == (1, 2)

    play(story)


def test_a_server_that_stops_lets_a_replaced_version_finish(tmp_path: Path, tiny: Tiny) -> None:
    async def story() -> None:
        async with shelf(tmp_path, Lingering()) as here:
            await promote(here, tiny)
            await here.deployments.deploy(LOCAL, "tiny", SHORT)
            async with here.deployments.generate(asking(max_tokens=9)) as answer:
                parts = [await anext(aiter(answer))]
                async with replacing(here, tiny) as change:
                    stopping = asyncio.ensure_future(here.deployments.stop(60.0))
                    await until(lambda: change.done())
                    assert not stopping.done()
                parts += [part async for part in answer]  # which goes on now
                assert (text_of(parts), parts[-1].finish) == ("abcabc", "length")
            await stopping
            assert isinstance(change.exception(), Unavailable)

    play(story)


@pytest.mark.parametrize("change", ["promote", "unload"])
def test_what_has_not_ended_within_its_time_is_cut(tmp_path: Path, tiny: Tiny, change: str) -> None:
    async def story() -> None:
        async with shelf(tmp_path, Lingering()) as here:
            await promote(here, tiny)
            options = SHORT.model_copy(update={"drain_s": 0.2})
            await here.deployments.deploy(LOCAL, "tiny", options)
            async with here.deployments.generate(asking(max_tokens=9)) as answer:
                await anext(aiter(answer))
                if change == "promote":
                    await promote(here, tiny)
                    assert (await ask(here, max_tokens=4))[0] == 2
                else:
                    await here.deployments.unload(LOCAL, "tiny")
                with pytest.raises(Unavailable, match="version 1 of 'tiny' ended before") as error:
                    await anext(aiter(answer))
                assert "`drain_s`" in error.value.next_step

    play(story)


def test_a_model_that_is_unloaded_finishes_its_answers(tmp_path: Path, tiny: Tiny) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            await promote(here, tiny)
            await here.deployments.deploy(LOCAL, "tiny", SHORT)
            whole = (await ask(here, max_tokens=100))[1]
            async with here.deployments.generate(asking(max_tokens=100)) as answer:
                assert here.leases.devices.held
                unloading = asyncio.ensure_future(here.deployments.unload(LOCAL, "tiny"))
                parts = [part async for part in answer]
                assert text_of(parts) == whole
            await unloading
            assert await refused(NotFound, ask(here)) == "no model is deployed"

    play(story)


def test_damage_and_missing_memory_are_found_before_the_engine_is_loaded(
    tmp_path: Path, tiny: Tiny
) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            await promote(here, tiny)
            deployments, free = here.deployments, here.host.free_bytes
            here.host.free_bytes = 600_000
            message = await refused(Conflict, deployments.deploy(LOCAL, "tiny", SHORT))
            assert "0.5 MiB of cache" in message
            # without a number the cache is as large as there is room, but holds the context
            here.host.free_bytes = 1_500_000
            await deployments.deploy(LOCAL, "tiny", DeploymentOptions())
            assert (await ask(here, max_tokens=2))[0] == 1
            here.host.free_bytes = free
            message = await refused(
                Unprocessable, deployments.deploy(LOCAL, "tiny", DeploymentOptions(instances=2))
            )
            assert "one process on one device" in message
            await deployments.unload(LOCAL, "tiny")
            (model,) = (await deployments.views(LOCAL)).models
            folder = here.repository.engine_folder(model.current)
            weights = folder / "openvino_model.bin"
            weights.write_bytes(weights.read_bytes()[:-1] + b"x")
            with pytest.raises(DamagedError, match=r"openvino_model\.bin") as error:
                await deployments.deploy(LOCAL, "tiny", SHORT)
            assert f"crucible promote tiny {model.current.job}" in error.value.next_step
            request = PromoteRequest(report=model.current.job)
            await deployments.promote(LOCAL, "tiny", request)  # restores it
            await deployments.deploy(LOCAL, "tiny", SHORT)
            assert (await ask(here, max_tokens=2))[0] == 1

    play(story)


def test_it_is_loaded_again_after_a_restart(tmp_path: Path, tiny: Tiny) -> None:
    async def before() -> None:
        async with shelf(tmp_path) as here:
            await promote(here, tiny)
            await here.deployments.deploy(LOCAL, "tiny", SHORT)

    async def after() -> None:
        async with shelf(tmp_path) as here:
            (served,) = here.deployments.languages(LOCAL)
            assert served.state == "ready"
            assert (await ask(here, max_tokens=2))[0] == 1

    play(before)
    play(after)
