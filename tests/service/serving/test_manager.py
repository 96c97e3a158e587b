"""Deployments under load and over restarts: no request is lost, nothing changes halfway."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pipeline.core.artifacts import Engine, Target
from pipeline.core.recipe import Precision, Recipe
from pipeline.errors import ChildDied, CrucibleError
from pipeline.report.files import load_report
from pipeline.results.benchmarks import LoadPoint
from service.auth import LOCAL, Caller
from service.devices.gpus import GpuKind
from service.devices.policy import Lease
from service.errors import Conflict, Forbidden, NotFound, Unavailable, Unprocessable
from service.inference import InferRequest
from service.registry.models import DeploymentOptions, ModelView, PromoteRequest
from service.registry.traffic import SeenShape
from tests.builders.report import engine as report_engine
from tests.service.serving.engines import play
from tests.service.serving.models import ALONE, MIB, Host, Shelf, shelf

OTHER, STRANGER = Caller("other", ("admin",)), Caller("stranger", ("infer",))
FOLLOW = DeploymentOptions()


async def refused(of: type[CrucibleError], call: object) -> str:
    with pytest.raises(of) as error:
        await call  # type: ignore[misc]
    return error.value.message


def test_thousands_of_requests_over_every_change_and_none_is_lost(tmp_path: Path) -> None:
    answered: Counter[int] = Counter()
    refusals: set[str] = set()

    async def client(here: Shelf, until: asyncio.Event) -> None:
        while not until.is_set():
            try:
                answered[await here.ask()] += 1
            except (NotFound, Unavailable) as error:  # while it is unloaded
                refusals.add(error.message)
                answered[0] += 1
                await asyncio.sleep(0)

    async def story() -> None:
        async with shelf(tmp_path) as here:
            assert await here.promote() == 1
            await here.deployments.deploy(LOCAL, "m", FOLLOW)
            done = asyncio.Event()
            clients = [asyncio.create_task(client(here, done)) for _ in range(16)]
            try:
                for _ in range(3):
                    await here.promote()
                    await asyncio.sleep(0.05)
                    await here.deployments.rollback(LOCAL, "m")
                    await asyncio.sleep(0.05)
                    await here.deployments.deploy(LOCAL, "m", DeploymentOptions(instances=2))
                    await here.deployments.unload(LOCAL, "m")
                    await asyncio.sleep(0.01)
                    await here.deployments.load(LOCAL, "m")
                while sum(answered.values()) < 5000 and not any(each.done() for each in clients):
                    await asyncio.sleep(0.01)
            finally:
                done.set()
                await asyncio.gather(
                    *clients
                )  # raises what any client got besides an answer or NotFound
            assert set(answered) >= {0, 1, 2, 3, 4}
            assert refusals <= {"no model 'm' is deployed", "model 'm' is loading"}
            assert (
                sum(worker.answered for worker in here.host.started)
                == sum(answered.values()) - answered[0]
            )
            assert here.host.alive == [1]

    play(story)


def test_a_request_names_a_version_or_none_and_one_model_needs_no_name(tmp_path: Path) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            assert await refused(NotFound, here.ask(None)) == "no model is deployed"
            await here.promote("a")
            await here.deployments.deploy(LOCAL, "a", FOLLOW)
            assert [await here.ask(None), await here.ask("a"), await here.ask("a", version=1)] == [
                1,
                1,
                1,
            ]
            assert (
                await refused(NotFound, here.ask("a", version=2))
                == "version 2 of 'a' is not deployed, 1 is"
            )
            await here.promote("b")
            await here.deployments.deploy(LOCAL, "b", FOLLOW)
            assert (
                await refused(Unprocessable, here.ask(None)) == "several models are deployed: a, b"
            )
            assert [deployment.model for deployment in here.deployments.served(LOCAL)] == ["a", "b"]
            assert [model.model for model in here.deployments.statistics(LOCAL)] == ["a", "b"]

    play(story)


def test_another_owners_models_are_not_there(tmp_path: Path) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            await here.promote()
            await here.deployments.deploy(LOCAL, "m", FOLLOW)
            assert await here.ask(caller=OTHER) == 1  # an admin sees all
            assert "'m'" in await refused(NotFound, here.ask(caller=STRANGER))
            assert (
                await refused(NotFound, here.ask(None, caller=STRANGER)) == "no model is deployed"
            )
            assert await refused(NotFound, here.deployments.view(STRANGER, "m")) == "no model 'm'"
            assert (
                here.deployments.served(STRANGER),
                (await here.deployments.views(STRANGER)).models,
            ) == ((), ())
            with pytest.raises(NotFound):
                await here.deployments.shapes(STRANGER, "m")
            for call in (
                here.deployments.deploy(STRANGER, "m", FOLLOW),
                here.deployments.unload(STRANGER, "m"),
                here.deployments.rollback(STRANGER, "m"),
                here.promote(caller=STRANGER),
                here.ask(caller=Caller("local", ("compile",))),
            ):
                await refused(Forbidden, call)

    play(story)


def test_a_load_that_does_not_fit_is_refused_before_the_device_is_touched(tmp_path: Path) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            await here.promote()
            peak = (await here.deployments.view(LOCAL, "m")).current.peak_bytes
            assert peak == 3.1e8  # the report says so
            here.host.free_bytes = 2 * peak
            message = await refused(
                Conflict, here.deployments.deploy(LOCAL, "m", DeploymentOptions(instances=3))
            )
            assert (
                message
                == "'m' with 3 instances needs at least 886.9 MiB (as in its benchmark), 591.3 MiB"
                " of cpu are free"
            )
            assert (here.host.started, here.leases.devices.held) == ([], ())
            assert (await here.deployments.view(LOCAL, "m")).deployment.state == "unloaded"
            await here.deployments.deploy(LOCAL, "m", DeploymentOptions(instances=2))
            assert (
                await here.ask(),
                (await here.deployments.view(LOCAL, "m")).current.memory_bytes,
            ) == (1, 7 * MIB // 2)
            here.host.free_bytes = 10 * MIB  # now it is known better
            message = await refused(
                Conflict, here.deployments.deploy(LOCAL, "m", DeploymentOptions(instances=3))
            )
            assert (
                message
                == "'m' with 3 instances needs at least 10.5 MiB (as when it was loaded before),"
                " 10.0 MiB of cpu are free"
            )
            assert await here.ask() == 1

    play(story)


def test_the_best_point_of_a_compile_gives_the_defaults_of_a_deployment(tmp_path: Path) -> None:
    best = LoadPoint(
        sizes={"batch": 4}, batch=4, sessions=2, requests=1000, samples_per_s=900.0, p50_s=0.008
    )

    async def story() -> None:
        async with shelf(tmp_path) as here:
            job = here.report()
            folder = here.folders.report(job)
            report = load_report(folder).model_copy(update={"best_point": best})
            (folder / "report.json").write_text(report.model_dump_json())
            view = await here.deployments.promote(LOCAL, "m", PromoteRequest(report=job))
            assert view.current.best_point == best
            here.host.free_bytes = int(1.5 * view.current.peak_bytes)
            message = await refused(
                Conflict, here.deployments.deploy(LOCAL, "m", DeploymentOptions(instances=2))
            )
            assert message.startswith("'m' with 2 instances needs at least 591.3 MiB")
            await here.deployments.deploy(LOCAL, "m", DeploymentOptions())
            assert here.host.started[-1].spec.instances == 1  # as many as fit
            here.host.free_bytes = 2 * view.current.peak_bytes
            await here.deployments.deploy(LOCAL, "m", DeploymentOptions())
            by_default = here.host.started[-1].spec
            assert (by_default.instances, by_default.max_batch) == (2, 4)
            await here.deployments.deploy(LOCAL, "m", DeploymentOptions(instances=1, max_batch=2))
            as_requested = here.host.started[-1].spec
            assert (as_requested.instances, as_requested.max_batch) == (1, 2)

    play(story)


def test_what_fails_leaves_all_as_it_was(tmp_path: Path) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            await here.promote()
            here.host.broken[1] = 1
            assert (
                await refused(ChildDied, here.deployments.deploy(LOCAL, "m", FOLLOW))
                == "the worker of version 1 died"
            )
            assert (await here.deployments.view(LOCAL, "m")).deployment.state == "unloaded"
            await here.deployments.deploy(LOCAL, "m", FOLLOW)
            here.host.broken[2] = 1
            await refused(ChildDied, here.promote())
            view = await here.deployments.view(LOCAL, "m")
            assert (
                view.current.version,
                [version.version for version in view.versions],
                view.deployment.version,
            ) == (1, [1], 1)
            assert not here.folders.version("m", 2).exists()
            assert await here.ask() == 1
            assert await here.promote() == 3  # a number is never given twice
            assert (await here.ask(), here.host.alive) == (3, [3])

    play(story)


def test_a_pinned_deployment_stays_on_its_version(tmp_path: Path) -> None:
    async def story() -> None:
        async with shelf(tmp_path, versions=1) as here:
            await here.promote()
            await here.deployments.deploy(LOCAL, "m", DeploymentOptions(version=1))
            for _ in range(3):
                await here.promote()
            view = await here.deployments.view(LOCAL, "m")
            assert (view.current.version, view.deployment.version, await here.ask()) == (4, 1, 1)
            assert [version.version for version in view.versions] == [
                4,
                3,
                1,
            ]  # current, what a rollback leads to, and what answers
            assert (
                await refused(
                    NotFound, here.deployments.deploy(LOCAL, "m", DeploymentOptions(version=2))
                )
                == "model 'm' has no version 2"
            )
            await here.deployments.deploy(LOCAL, "m", FOLLOW)
            assert await here.ask() == 4

    play(story)


def test_more_rows_than_were_proved_are_refused(tmp_path: Path) -> None:
    async def story() -> None:
        host = Host()
        async with shelf(tmp_path, host) as here:
            await here.promote()
            message = await refused(
                Unprocessable, here.deployments.deploy(LOCAL, "m", DeploymentOptions(max_batch=9))
            )
            assert "max_batch is 9, version 1 of 'm' takes at most 8" in message
            await here.deployments.deploy(LOCAL, "m", DeploymentOptions(max_batch=4))
            host.batch = ALONE
            await here.promote()
            most = [
                (worker.spec.options.max_batch, worker.spec.version.most_together)
                for worker in host.started
            ]
            assert most == [(4, 8), (4, 1)]
            message = await refused(
                Unprocessable, here.deployments.deploy(LOCAL, "m", DeploymentOptions(max_batch=2))
            )
            assert message.endswith("at most 1: rows influence each other")

    play(story)


def test_what_was_deployed_is_loaded_again_and_one_that_fails_blocks_no_other(
    tmp_path: Path,
) -> None:
    async def before() -> None:
        async with shelf(tmp_path) as here:
            for name in ("a", "b", "c", "gone"):
                await here.promote(name)
                await here.deployments.deploy(LOCAL, name, DeploymentOptions(instances=2))
            await here.promote("b")
            await here.deployments.unload(LOCAL, "gone")
            (
                here.repository.engine_folder((await here.deployments.view(LOCAL, "a")).current)
                / "engine.json"
            ).unlink()

    async def after() -> None:
        async with shelf(tmp_path) as here:
            states = {each.model: each.state for each in here.deployments.served(LOCAL)}
            assert states == {"a": "failed", "b": "ready", "c": "ready"}
            assert [await here.ask("b"), await here.ask("c")] == [2, 1]
            damaged = "version 1 of 'a' is damaged: 'engine.json' is missing; `crucible promote a "
            assert damaged in await refused(Unavailable, here.ask("a"))
            view = await here.deployments.view(LOCAL, "a")
            assert (view.deployment.state, view.deployment.version) == ("failed", None)
            assert damaged in view.deployment.reason
            await here.promote("a")  # a version that works mends it
            assert await here.ask("a") == 2

    play(before)
    play(after)


@pytest.mark.parametrize(("failures", "state"), [(2, "ready"), (3, "failed")])
def test_a_model_that_crashes_at_the_start_is_tried_three_times(
    tmp_path: Path, failures: int, state: str
) -> None:
    async def before() -> None:
        async with shelf(tmp_path) as here:
            await here.promote()
            await here.deployments.deploy(LOCAL, "m", FOLLOW)

    async def after() -> None:
        host = Host()
        host.broken[1] = failures
        async with shelf(tmp_path, host) as here:
            (deployment,) = here.deployments.served(LOCAL)
            assert deployment.state == state
            if state == "failed":
                assert deployment.reason == "the worker of version 1 died"
                await refused(Unavailable, here.ask())
                host.broken[1] = 1
                await refused(ChildDied, here.deployments.load(LOCAL, "m"))
                assert here.deployments.served(LOCAL)[0].state == "failed"
                await here.deployments.load(LOCAL, "m")
            assert await here.ask() == 1

    play(before)
    play(after)


def test_an_engine_that_hangs_at_the_start_is_tried_once_and_the_rest_is_loaded(
    tmp_path: Path,
) -> None:
    async def before() -> None:
        async with shelf(tmp_path) as here:
            for name in ("a", "b"):
                await here.promote(name)
                await here.deployments.deploy(LOCAL, name, FOLLOW)

    async def after() -> None:
        host = Host()
        host.hanging = {"a"}
        early = Shelf(tmp_path, host)
        starting = asyncio.create_task(early.deployments.start())
        while not host.tried:
            await asyncio.sleep(0)
        assert early.deployments.starting() == (2, 2)
        await starting
        states = {each.model: (each.state, each.reason) for each in early.deployments.served(LOCAL)}
        assert states == {"a": ("failed", "it did not load its engine in time"), "b": ("ready", "")}
        assert (host.tried["a"], await early.ask("b"), early.deployments.starting()) == (
            1,
            1,
            (0, 2),
        )
        await early.deployments.stop(5.0)
        await early.deployments.close()
        early.database.close()

    play(before)
    play(after)


def test_before_the_start_and_after_the_end_changes_are_refused_as_unavailable(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            await here.promote()
            early = Shelf(tmp_path, Host())
            for deployments, word, seconds in (
                (early.deployments, "starting", "1"),
                (here.deployments, "stopping", "5"),
            ):
                if word == "stopping":
                    await deployments.stop(5.0)
                for call in (
                    deployments.load(LOCAL, "m"),
                    deployments.unload(LOCAL, "m"),
                    deployments.infer(InferRequest(LOCAL, "m", {})),
                ):
                    with pytest.raises(Unavailable, match=f"^the server is {word}\n") as error:
                        await call
                    assert error.value.headers == {"Retry-After": seconds}
            await early.deployments.close()
            early.database.close()
            assert (early.host.started, here.host.started) == ([], [])

    play(story)


def test_changes_of_one_model_wait_for_each_other(tmp_path: Path) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            await here.promote()
            changes = [
                here.deployments.deploy(LOCAL, "m", DeploymentOptions(instances=n + 1))
                for n in range(4)
            ]
            await asyncio.gather(*changes, here.promote())
            assert (await here.ask(), here.host.alive) == (2, [2])
            assert (
                await refused(NotFound, here.deployments.unload(LOCAL, "n"))
                == "no model 'n' is deployed"
            )

    play(story)


def test_a_request_that_goes_away_does_not_stop_the_change_it_asked_for(tmp_path: Path) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            await here.promote()
            request = asyncio.create_task(here.deployments.deploy(LOCAL, "m", FOLLOW))
            await asyncio.sleep(0)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            while not here.host.started:
                await asyncio.sleep(0.01)
            while here.deployments.find(LOCAL, "m").state != "ready":
                await asyncio.sleep(0.01)
            assert await here.ask() == 1

    play(story)


def test_a_server_that_stops_ends_changes_and_what_is_stored_holds(tmp_path: Path) -> None:
    async def before() -> None:
        async with shelf(tmp_path) as here:
            await here.promote()
            await here.deployments.deploy(LOCAL, "m", FOLLOW)
            promoting: asyncio.Task[int] = asyncio.create_task(here.promote())
            while len(here.host.proofs) < 2:
                await asyncio.sleep(0)
            await here.deployments.stop(5.0)
            (error,) = await asyncio.gather(promoting, return_exceptions=True)
            assert isinstance(error, Unavailable)
            for model in ("m", None):  # not "no such model": it is there again when the server is
                assert await refused(Unavailable, here.ask(model)) == "the server is stopping"

    async def after() -> None:
        async with shelf(tmp_path) as here:
            view = await here.deployments.view(LOCAL, "m")
            assert view.deployment.version == view.current.version
            assert await here.ask() == view.current.version

    play(before)
    play(after)


def test_a_lease_is_held_while_there_are_requests_and_measuring_gets_its_turn(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            await here.promote()
            await here.deployments.deploy(LOCAL, "m", FOLLOW)
            assert [each.use for each in here.leases.devices.held] == ["serve"]
            measured = await here.leases.ask(
                Lease("cpu", "measure", "job"), patience_s=60
            )  # until it is quiet
            assert not measured.contended
            await here.ask()
            lease = here.leases.measured("job", "cpu")
            assert lease is not None
            assert lease.contended

    play(story)


def test_shapes_and_memory_are_told(tmp_path: Path) -> None:
    async def story() -> None:
        async with shelf(tmp_path) as here:
            await here.promote()
            with pytest.raises(NotFound):
                await here.deployments.shapes(LOCAL, "m")
            view: ModelView = await here.deployments.deploy(
                LOCAL, "m", DeploymentOptions(queue_limit=7)
            )
            assert (view.deployment.memory_bytes, view.deployment.device) == (7 * MIB, "cpu")
            assert view.deployment.options is not None
            assert view.deployment.options.queue_limit == 7
            for rows in (1, 2, 2):
                here.host.started[-1].traffic.requested((("batch", rows),))
            assert (await here.deployments.shapes(LOCAL, "m")).shapes == (
                SeenShape(sizes={"batch": 2}, requests=2),
                SeenShape(sizes={"batch": 1}, requests=1),
            )
            await here.deployments.unload(LOCAL, "m")
            after = (await here.deployments.view(LOCAL, "m")).deployment
            assert (after.state, after.version, after.memory_bytes) == ("unloaded", None, None)
            await here.deployments.load(LOCAL, "m")
            assert here.host.started[-1].spec.options.queue_limit == 7  # as it was deployed last

    play(story)


H200, L4 = GpuKind("NVIDIA H200", "9.0"), GpuKind("NVIDIA L4", "8.9")
GPUS = {"gpu:0": H200, "gpu:1": L4, "gpu:2": H200}


def gpu_engine(folder: Path) -> Engine:
    """An engine for an H200, which nothing here runs."""
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"engine")
    recipe = Recipe(backend="tensorrt", precision=Precision.FP16)
    target = Target(
        backend="tensorrt", version="10.6.0", device=H200.name, compute_capability="9.0"
    )
    return report_engine(recipe, 6, folder).model_copy(update={"target": target})


@asynccontextmanager
async def gpu_shelf(home: Path) -> AsyncIterator[Shelf]:
    """A host with two H200 and an L4, and an engine for an H200 which is promoted."""
    host = Host()
    host.kinds = dict(GPUS)
    async with shelf(home, host, ("cpu", *GPUS)) as here:
        request = PromoteRequest(report=here.report(engine=gpu_engine(home / "built")))
        await here.deployments.promote(LOCAL, "m", request)
        yield here


def holders(here: Shelf) -> list[str]:
    return sorted(lease.device for lease in here.leases.devices.held)


def test_a_model_serves_on_all_gpus_of_its_kind_with_a_lease_on_each(tmp_path: Path) -> None:
    async def story() -> None:
        async with gpu_shelf(tmp_path) as here:
            everywhere = DeploymentOptions(device="all", instances=2)
            view = (await here.deployments.deploy(LOCAL, "m", everywhere)).deployment
            assert (view.state, view.device, view.options) == ("ready", "gpu:0, gpu:2", everywhere)
            assert [each.device for each in view.devices] == ["gpu:0", "gpu:2"]
            assert view.note == (
                "`all` leaves out, as the engine was built for NVIDIA H200, compute capability 9.0:"
                " gpu:1 is NVIDIA L4, compute capability 8.9"
            )
            spec = here.host.started[-1].spec
            assert (spec.instances, spec.all_instances) == (2, 4)
            assert holders(here) == ["gpu:0", "gpu:2"]
            measured = await here.leases.ask(Lease("gpu:2", "measure", "job"), patience_s=60)
            assert not measured.contended  # the model is idle
            await here.ask()
            assert holders(here) == ["gpu:0", "gpu:2", "gpu:2"]
            lease = here.leases.measured("job", "gpu:2")
            assert lease is not None
            assert lease.contended
            _, device = await here.deployments.lend(LOCAL, "m", None, "lent")
            assert device == "gpu:0"
            moved = DeploymentOptions(device=("gpu:2",))
            view = (await here.deployments.deploy(LOCAL, "m", moved)).deployment
            assert (view.device, view.note) == ("gpu:2", "")
            assert holders(here) == ["gpu:2"]
            await here.deployments.unload(LOCAL, "m")
            assert holders(here) == []
            await here.deployments.load(LOCAL, "m")  # with its last options
            assert here.host.started[-1].spec.devices == ("gpu:2",)

    play(story)


def test_the_memory_of_each_device_counts(tmp_path: Path) -> None:
    async def story() -> None:
        async with gpu_shelf(tmp_path) as here:
            here.host.free_bytes_of["gpu:2"] = 3
            message = await refused(
                Conflict, here.deployments.deploy(LOCAL, "m", DeploymentOptions(device="all"))
            )
            assert message.endswith("0.0 MiB of gpu:2 are free")
            assert (here.host.started, holders(here)) == ([], [])
            del here.host.free_bytes_of["gpu:2"]
            view = await here.deployments.deploy(LOCAL, "m", DeploymentOptions(device="all"))
            assert view.current.memory_bytes == 7 * MIB // 2  # of one instance

    play(story)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu:7", "the engine was built for a GPU and does not run on device 'gpu:7'"),
        (("gpu:0", "gpu:7"), "does not run on device 'gpu:7'; devices that fit: gpu:0, gpu:1"),
        (("gpu:0", "cpu"), "the engine was built for a GPU and does not run on device 'cpu'"),
        ("All", "does not run on device 'All'"),
        (("gpu:0", ""), "does not run on device ''"),
    ],
)
def test_devices_that_the_engine_does_not_run_on_are_refused(
    tmp_path: Path, device: str | tuple[str, ...], message: str
) -> None:
    async def story() -> None:
        async with gpu_shelf(tmp_path) as here:
            options = DeploymentOptions(device=device)
            assert message in await refused(
                Unprocessable, here.deployments.deploy(LOCAL, "m", options)
            )
            assert (await here.deployments.view(LOCAL, "m")).deployment.state == "unloaded"

    play(story)


def test_all_is_refused_where_no_gpu_is_of_the_kind(tmp_path: Path) -> None:
    async def story() -> None:
        async with gpu_shelf(tmp_path) as here:
            here.host.kinds = {"gpu:1": L4}
            message = await refused(
                Unprocessable, here.deployments.deploy(LOCAL, "m", DeploymentOptions(device="all"))
            )
            assert "this server has no such GPU (gpu:1 is NVIDIA L4, compute" in message

    play(story)


def test_all_devices_of_a_cpu_engine_are_the_cpu(tmp_path: Path) -> None:
    async def story() -> None:
        async with shelf(tmp_path, devices=("cpu", "gpu:0")) as here:
            await here.promote()
            for device in ("all", ("cpu",)):
                options = DeploymentOptions(device=device)
                view = (await here.deployments.deploy(LOCAL, "m", options)).deployment
                assert (view.device, view.note) == ("cpu", "")
            both = DeploymentOptions(device=("cpu", "gpu:0"))
            assert "was built for a CPU and does not run on device 'gpu:0'" in await refused(
                Unprocessable, here.deployments.deploy(LOCAL, "m", both)
            )

    play(story)


def test_a_model_that_loads_again_at_the_start_takes_all_gpus_that_are_there_then(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with gpu_shelf(tmp_path) as here:
            await here.deployments.deploy(LOCAL, "m", DeploymentOptions(device="all"))
        host = Host()
        host.kinds = {"gpu:0": H200}
        async with shelf(tmp_path, host, ("cpu", "gpu:0")) as here:
            view = (await here.deployments.view(LOCAL, "m")).deployment
            assert (view.state, view.device) == ("ready", "gpu:0")
            assert here.deployments.find(LOCAL, "m").instances == 1

    play(story)
