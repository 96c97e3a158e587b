"""Two servers on one database and one home: each loads what the other one has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from service.auth import LOCAL
from service.errors import NotFound
from service.jobs.nodes import Nodes
from service.registry.models import DeploymentOptions, ServerState
from tests.service.builders.postgresql import refusing_connections
from tests.service.serving.engines import play
from tests.service.serving.models import Host, Shelf, shelf

FOLLOW = DeploymentOptions()
Story = Callable[[Shelf, Shelf], Awaitable[None]]


@asynccontextmanager
async def server(home: Path, url: str, name: str, host: Host | None = None) -> AsyncIterator[Shelf]:
    async with shelf(home, host, shared=(url, name)) as opened:
        Nodes(opened.database, name, "server").send_heartbeat({})
        yield opened
        Nodes(opened.database, name, "server").leave()


def at_two_servers(home: Path, url: str, story: Story) -> None:
    async def run() -> None:
        async with server(home, url, "one") as one, server(home, url, "two") as two:
            await story(one, two)

    play(run)


async def states(here: Shelf) -> dict[str, ServerState]:
    return {each.server: each for each in (await here.deployments.view(LOCAL, "m")).servers}


def test_every_change_at_one_server_holds_at_both_when_it_returns(
    tmp_path: Path, postgresql: str
) -> None:
    async def story(one: Shelf, two: Shelf) -> None:
        await one.promote()
        with pytest.raises(NotFound):
            await two.ask()
        await one.deployments.deploy(LOCAL, "m", FOLLOW)
        assert [await one.ask(), await two.ask()] == [1, 1]
        await two.promote()
        assert [await one.ask(), await two.ask()] == [2, 2]
        await one.deployments.rollback(LOCAL, "m")
        assert [await one.ask(), await two.ask()] == [1, 1]
        await two.deployments.deploy(LOCAL, "m", DeploymentOptions(instances=2))
        for here in (one, two):
            assert (await here.deployments.view(LOCAL, "m")).deployment.state == "ready"
            assert here.deployments.find(LOCAL, "m").instances == 2
            found = await states(here)
            assert {each: state.version for each, state in found.items()} == {"one": 1, "two": 1}
            loads = [worker.spec.version.version for worker in here.host.started]
            assert loads == [1, 2, 1, 1], "each change is loaded once"
        await two.deployments.unload(LOCAL, "m")
        for here in (one, two):
            with pytest.raises(NotFound):
                await here.ask()
            assert {state.state for state in (await states(here)).values()} == {"unloaded"}

    at_two_servers(tmp_path, postgresql, story)


def test_a_server_that_starts_loads_what_the_others_have(tmp_path: Path, postgresql: str) -> None:
    async def story() -> None:
        async with server(tmp_path, postgresql, "one") as one:
            await one.promote()
            await one.deployments.deploy(LOCAL, "m", FOLLOW)
            async with server(tmp_path, postgresql, "two") as two:
                assert await two.ask() == 1
                while len(await states(one)) < 2:
                    await asyncio.sleep(0.05)
            assert set(await states(one)) == {"one"}, "it has gone"

    play(story)


def test_a_server_that_cannot_load_a_version_keeps_the_old_one_and_says_why(
    tmp_path: Path, postgresql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.serving.hosts.follower.RETRY_S", 0.1)

    async def story(one: Shelf, two: Shelf) -> None:
        await one.promote()
        await one.deployments.deploy(LOCAL, "m", FOLLOW)
        two.host.broken[2] = 1000
        await one.promote()
        assert [await one.ask(), await two.ask()] == [2, 1]
        failed = (await states(one))["two"]
        assert (failed.state, failed.version) == ("ready", 1)
        assert "the worker of version 2 died" in failed.reason
        two.host.broken.clear()
        while await two.ask() != 2:
            await asyncio.sleep(0.05)
        while (await states(one))["two"].reason:
            await asyncio.sleep(0.05)

    at_two_servers(tmp_path, postgresql, story)


def test_a_server_that_has_not_loaded_a_model_unloads_it_everywhere(
    tmp_path: Path, postgresql: str
) -> None:
    async def story(one: Shelf, two: Shelf) -> None:
        await one.promote()
        two.host.broken[1] = 1000
        await one.deployments.deploy(LOCAL, "m", FOLLOW)
        assert (await states(one))["two"].state == "failed"
        await two.deployments.unload(LOCAL, "m")
        with pytest.raises(NotFound):
            await one.ask()

    at_two_servers(tmp_path, postgresql, story)


def test_a_version_that_another_server_has_loaded_is_kept(tmp_path: Path, postgresql: str) -> None:
    async def story(one: Shelf, two: Shelf) -> None:
        await one.promote()
        await one.deployments.deploy(LOCAL, "m", FOLLOW)
        two.host.broken.update({2: 1000, 3: 1000})
        for _ in range(2):
            await one.promote()
        one.repository.prune("m", {3}, 1)
        kept = {version.version for version in one.repository.get("m").versions}
        assert kept == {1, 2, 3}, "2 comes before 3"
        assert await two.ask() == 1

    at_two_servers(tmp_path, postgresql, story)


def test_without_the_database_the_models_answer(tmp_path: Path, postgresql: str) -> None:
    async def story(one: Shelf, two: Shelf) -> None:
        await one.promote()
        await one.deployments.deploy(LOCAL, "m", FOLLOW)
        with refusing_connections(postgresql):
            await asyncio.sleep(1.5)  # they have looked
            assert [await one.ask(), await two.ask()] == [1, 1]
        await two.promote()
        assert [await one.ask(), await two.ask()] == [2, 2]

    at_two_servers(tmp_path, postgresql, story)
