"""Engines that are code: only what this server's own jobs have built is promoted and loaded."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.artifacts import Engine
from pipeline.core.recipe import CompileMode
from pipeline.errors import DamagedError, InternalError
from pipeline.report.bundle import read_engine, seal
from service.auth import LOCAL
from service.devices.leases import utc_now
from service.errors import Conflict
from service.jobs.publish import engine_digest
from service.jobs.state import Started, Succeeded
from service.registry.models import DeploymentOptions, PromoteRequest
from service.serving.deployment import DeploymentSpec
from service.serving.loader import COLD_STARTS
from service.serving.request_shapes import captures
from service.serving.worker import open_engine
from service.serving.worker_client import worker_for
from tests.service.builders.jobs import new_job, write_out
from tests.service.serving.engines import PROVED, linear, play, version_of_engine
from tests.service.serving.models import Shelf, shelf


def program(folder: Path, mode: CompileMode | None = None, on_gpu: bool = False) -> Engine:
    """An engine that says it is a PyTorch program; nothing here runs it."""
    engine = linear(folder)
    target = {"backend": "torch", "compute_capability": "9.0" if on_gpu else None}
    recipe = {"backend": "torch", "form": "compile" if mode else "aoti", "mode": mode}
    return engine.model_copy(
        update={
            "target": engine.target.model_copy(update=target),
            "recipe": engine.recipe.model_copy(update=recipe),
            "cold_start_s": 100.0 if mode else None,
        },
    )


def own_job(here: Shelf, engine: Engine, known: bool = True) -> str:
    """A job of this server that has ended with this engine; `known`: the database says so."""
    job = new_job(here.folders, "m")
    here.jobs.add(job, utc_now())
    here.jobs.append(job.id, Started(1, 1.0), utc_now())
    place = here.folders.report(job.id)
    write_out(place, here.folders.home / "store" / job.id, engine)
    digest = engine_digest(place) if known else None
    here.jobs.append(job.id, Succeeded("accepted", "w", digest), utc_now())
    return job.id


async def promote(here: Shelf, job: str) -> int:
    request = PromoteRequest(report=job, override=True)
    return (await here.deployments.promote(LOCAL, "m", request)).current.version


def test_a_program_has_a_worker_of_its_own_which_no_other_engine_gets(tmp_path: Path) -> None:
    ours, other = program(tmp_path), linear(tmp_path)
    assert worker_for(ours) == (sys.executable, "-m", "service.serving.torch_worker")
    assert worker_for(other) == (sys.executable, "-m", "service.serving.worker")
    with pytest.raises(InternalError, match="is code, and came to a worker that loads none"):
        open_engine(ours)
    assert open_engine(other).session() is not None


def test_what_an_own_job_has_built_is_promoted_and_loaded(tmp_path: Path) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            engine = program(tmp_path / "engines", mode="max-autotune")
            assert await promote(here, own_job(here, engine)) == 1
            await here.deployments.deploy(LOCAL, "m", DeploymentOptions())
            (started,) = here.host.started
            assert started.spec.load_s == COLD_STARTS * 100.0  # it compiles when it is loaded

    play(story)


def test_an_intact_engine_that_no_job_of_this_server_built_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            job = own_job(here, program(tmp_path / "engines"), known=False)
            with pytest.raises(
                Conflict, match=f"differs from the engine that job {job} built on this server"
            ):
                await promote(here, job)
            own, foreign = (own_job(here, program(tmp_path / "engines")) for _ in range(2))
            shutil.rmtree(here.folders.report(own))
            shutil.copytree(here.folders.report(foreign), here.folders.report(own))
            with pytest.raises(Conflict, match="differs from the engine that job"):
                await promote(here, own)

    play(story)


def change_description(root: Path, change: dict[str, Any]) -> None:
    """Say of an engine that it is a PyTorch program, and what else is given."""
    file = root / "engine.json"
    description = json.loads(file.read_text())
    description["target"]["backend"] = "torch"
    file.write_text(json.dumps({**description, **change}))


def reseal(root: Path) -> None:
    """Write the manifest anew, as it would be if the engine had been delivered like this."""
    description = json.loads((root / "engine.json").read_text())
    (root / "artifact.json").unlink()
    seal(root, Engine.model_validate({**description, "root": root}))
    assert read_engine(root).target.backend == "torch"


def test_an_engine_whose_description_was_changed_is_refused(tmp_path: Path) -> None:
    """The description says which backend loads the files: changed alone, it does not fit its
    manifest.

    Whoever writes the manifest anew as well makes an engine that is whole. The database still knows
    that no job built it.
    """

    async def story() -> None:
        async with shelf(tmp_path) as here:
            for engine, change in (
                (program(tmp_path / "engines"), {"threads": 7}),
                (linear(tmp_path / "engines"), {}),
            ):
                job = own_job(here, engine)
                root = here.folders.report(job) / "engine"
                change_description(root, change)
                damaged = f"the engine of job {job} is damaged: 'engine.json' differs from"
                with pytest.raises(DamagedError, match=damaged):
                    await promote(here, job)
                reseal(root)
                with pytest.raises(Conflict, match=f"differs from the engine that job {job} built"):
                    await promote(here, job)

    play(story)


def test_a_version_whose_files_were_replaced_by_other_whole_ones_is_not_loaded(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            version = await promote(here, own_job(here, program(tmp_path / "engines")))
            other = own_job(here, program(tmp_path / "engines", mode="reduce-overhead"))
            place = here.folders.version("m", version) / "engine"
            shutil.rmtree(place)
            shutil.copytree(here.folders.report(other) / "engine", place)
            with pytest.raises(Conflict, match="differs from the engine that job"):
                await here.deployments.deploy(LOCAL, "m", DeploymentOptions())
            with pytest.raises(Conflict, match="differs from the engine that job"):
                await here.deployments.lend(LOCAL, "m", None, "a job")
            (place / "model.onnx").write_bytes(b"torn")
            with pytest.raises(DamagedError, match="version 1 of 'm' is damaged: 'model"):
                await here.deployments.deploy(LOCAL, "m", DeploymentOptions())

    play(story)


@pytest.mark.parametrize(
    ("mode", "on_gpu", "captured"),
    [(None, True, False), ("reduce-overhead", True, True), ("reduce-overhead", False, False)],
)
def test_cuda_graphs_of_torch_compile_are_padded_to_and_have_a_worker_each(
    tmp_path: Path, mode: CompileMode | None, on_gpu: bool, captured: bool
) -> None:
    engine = program(tmp_path, mode, on_gpu)
    assert captures(engine) is captured
    options = DeploymentOptions(instances=3)
    spec = DeploymentSpec(version_of_engine(engine, PROVED, "m"), engine, options, ("gpu:0",), 60.0)
    assert (spec.instances, spec.sessions) == (3, 1)  # three workers
