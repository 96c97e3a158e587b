"""A damaged model is refused by name, the others go on, and its job brings it back."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from pipeline.core.artifacts import Engine
from pipeline.errors import CrucibleError, DamagedError
from service.auth import LOCAL
from service.errors import Unavailable
from service.inference import InferRequest
from service.registry.models import DeploymentOptions, PromoteRequest
from service.registry.repository import promoted_engine
from service.serving.deployment import Deployment
from service.serving.manager import ModelManager
from service.serving.stats import Figures
from tests.builders.cli import crucible_here
from tests.service.serving.engines import MODEL, deployed, linear, marked, play
from tests.service.serving.models import Host, Shelf, ended_job

FOLLOW = DeploymentOptions()
MEMORY = 2**40  # free bytes: the sample report's figures are not this engine's


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


class Real(Shelf):
    """A home whose deployments load real engines in real workers."""

    def __init__(self, home: Path, engine: Engine) -> None:
        super().__init__(home, Host())
        start = partial(Deployment.start, figures=Figures(CollectorRegistry()))
        context = replace(self.deployments._context, start=start, free=lambda device: MEMORY)
        self.deployments, self._engine = ModelManager(context), engine

    async def serve(self, name: str) -> str:
        """Promote and load a new job's engine; the job's id."""
        job = ended_job(self.folders, self.jobs, engine=self._engine)
        await self.deployments.promote(LOCAL, name, PromoteRequest(report=job))
        await self.deployments.deploy(LOCAL, name, FOLLOW)
        return job

    async def answers(self, name: str) -> bool:
        x = marked(1)
        answer = await self.deployments.infer(InferRequest(LOCAL, name, {"x": x}))
        return bool(np.allclose(np.linalg.norm(answer.outputs["y"]), np.linalg.norm(x)))

    def file(self, name: str, version: int = 1) -> Path:
        return self.folders.version(name, version) / "engine" / self._engine.file


@asynccontextmanager
async def real(home: Path, engine: Engine) -> AsyncIterator[Real]:
    opened = Real(home, engine)
    await opened.deployments.start()
    try:
        yield opened
    finally:
        await opened.deployments.stop(5.0)
        await opened.deployments.close()
        opened.database.close()
        opened.leases.close()


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return linear(tmp_path / "built")


async def refused(of: type[CrucibleError], call: object) -> CrucibleError:
    with pytest.raises(of) as error:
        await call  # type: ignore[misc]
    return error.value


CHANGED = "version 1 of 'a' is damaged: 'model.onnx' has another digest than when it was written: "


def test_a_worker_loads_no_damaged_engine(tmp_path: Path, engine: Engine) -> None:
    async def story() -> None:
        flip(engine.path)
        with pytest.raises(DamagedError, match=r"is damaged: 'model\.onnx' has"):
            async with deployed(tmp_path, engine):
                pass

    play(story)


def test_a_worker_that_crashed_is_not_started_again_on_damaged_files(
    tmp_path: Path,
    engine: Engine,
) -> None:
    async def story() -> None:
        async with deployed(tmp_path, engine) as bench:
            assert (await bench.ask(marked(1))).version == 1
            flip(engine.path)
            (instance,) = bench.deployment._instances
            assert instance._worker is not None
            instance._worker._break("was broken by a test")
            while bench.deployment.served().state != "failed":
                await asyncio.sleep(0.05)
            assert f"version 1 of '{MODEL}' is damaged" in bench.deployment.served().reason

    play(story)


def test_a_damaged_model_is_refused_until_its_job_is_promoted_again(
    tmp_path: Path,
    engine: Engine,
) -> None:
    jobs: dict[str, str] = {}

    async def before() -> None:
        async with real(tmp_path / "home", engine) as here:
            for name in "ab":
                jobs[name] = await here.serve(name)
            flip(here.file("a"))

    async def after() -> None:
        remedy = f"`crucible promote a {jobs['a']}` takes the engine from its job again"
        async with real(tmp_path / "home", engine) as here:
            states = {each.model: each.state for each in here.deployments.served(LOCAL)}
            assert states == {"a": "failed", "b": "ready"}
            assert await here.answers("b")
            entry = (await here.deployments.view(LOCAL, "a")).deployment
            assert (CHANGED in entry.reason, entry.reason.endswith(remedy)) == (True, True)
            failed = await refused(Unavailable, here.answers("a"))
            assert CHANGED in failed.message
            error = await refused(DamagedError, here.deployments.deploy(LOCAL, "a", FOLLOW))
            assert (CHANGED in error.message, error.next_step) == (True, remedy)
            view = await here.deployments.promote(LOCAL, "a", PromoteRequest(report=jobs["a"]))
            assert (view.current.version, view.deployment.state) == (1, "ready")
            assert await here.answers("a")
            assert not list(here.folders.models.glob(".*"))

    play(before)
    play(after)


def test_a_version_whose_job_is_damaged_too_is_to_be_compiled_again(
    tmp_path: Path,
    engine: Engine,
) -> None:
    async def story() -> None:
        async with real(tmp_path, engine) as here:
            job = await here.serve("a")
            await here.deployments.unload(LOCAL, "a")
            flip(here.file("a"))
            flip(here.folders.report(job) / "engine" / "model.onnx")
            error = await refused(DamagedError, here.deployments.deploy(LOCAL, "a", FOLLOW))
            assert error.next_step.startswith("compile the model again, and promote that")
            promoting = here.deployments.promote(LOCAL, "a", PromoteRequest(report=job))
            error = await refused(DamagedError, promoting)
            assert f"the engine of job {job} is damaged: 'model.onnx'" in error.message
            shutil.rmtree(here.folders.report(job))
            error = await refused(DamagedError, here.deployments.deploy(LOCAL, "a", FOLLOW))
            assert error.next_step.startswith("compile the model again, and promote that")

    play(story)


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (flip, "'model.onnx' has another digest"),
    (Path.unlink, "'model.onnx' is missing"),
    (lambda file: (file.parent / "more.bin").touch(), "'more.bin' was added"),
    (lambda file: (file.parent / "engine.json").unlink(), "'engine.json' is missing"),
    (lambda file: (file.parent / "engine.json").write_text("{"), "'engine.json' is not an engine"),
    (lambda file: (file.parent / "artifact.json").unlink(), "'artifact.json' is missing"),
    (lambda file: shutil.rmtree(file.parents[1]), "'engine.json' is missing"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_whatever_is_damaged_is_named_and_restored(
    tmp_path: Path,
    engine: Engine,
    damage: Callable[[Path], object],
    message: str,
) -> None:
    async def story() -> None:
        async with real(tmp_path, engine) as here:
            job = await here.serve("a")
            await here.deployments.unload(LOCAL, "a")
            damage(here.file("a"))
            error = await refused(DamagedError, here.deployments.deploy(LOCAL, "a", FOLLOW))
            assert error.message.startswith("version 1 of 'a' is damaged: ")
            assert message in error.message
            view = await here.deployments.promote(LOCAL, "a", PromoteRequest(report=job))
            assert (view.current.version, view.deployment.state) == (1, "unloaded")
            await here.deployments.deploy(LOCAL, "a", FOLLOW)
            assert await here.answers("a")

    play(story)


def test_a_damaged_engine_does_not_become_a_version(tmp_path: Path, engine: Engine) -> None:
    async def story() -> None:
        async with real(tmp_path, engine) as here:
            job = ended_job(here.folders, here.jobs, engine=engine)
            engine_folder = here.folders.report(job) / "engine"
            flip(engine_folder / "model.onnx")
            await here.serve("a")
            version = here.repository.get("a").version()
            with pytest.raises(DamagedError):
                here.repository.add(version, engine_folder, current=True)
            assert [each.version for each in here.repository.get("a").versions] == [1]
            assert not list(here.folders.models.glob(".*"))

    play(story)


def test_a_damaged_version_is_not_exported(
    tmp_path: Path,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        async with real(tmp_path / "home", engine) as here:
            await here.serve("a")
            flip(here.file("a"))

    play(story)
    monkeypatch.setenv("CRUCIBLE_HOME", str(tmp_path / "home"))
    with pytest.raises(DamagedError, match="version 1 of 'a' is damaged"):
        promoted_engine(tmp_path / "home", "a", 1)
    result = crucible_here("export", "--triton", "a/1", "models", cwd=tmp_path)
    assert (result.code, CHANGED in result.err) == (1, True)
    assert (
        "`crucible models a` shows the job of the version, and `crucible promote a JOB`"
        in result.err
    )
    assert not (tmp_path / "models").exists()
