"""What the actor does on a host, without Ray: the node is a small process."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.errors import HostError
from service.cluster.agent import (
    Agent,
    AgentOptions,
    last_lines,
    living_node,
    settings_fault,
)
from service.cluster.record import NodeRecord, write_record
from tests.service.cluster.ray_cluster import end_node

NODE = """
import sys, time
from pathlib import Path
from service.cluster.record import NodeRecord, write_record
print("options", *sys.argv[1:], flush=True)
file = Path(sys.argv[sys.argv.index("--record") + 1])
write_record(file, NodeRecord.of_this_process("new"))
time.sleep(600)
"""
OPTIONS = AgentOptions(("gpu:0", "cpu"), "rack=a", ("-c", NODE))
ROOT = Path(__file__).parents[3]


def new_agent(options: AgentOptions) -> Agent:
    return Agent(options, lambda: dict(os.environ))


@pytest.fixture(autouse=True)
def _in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = new_agent(OPTIONS)
    yield agent
    if (record := agent.current) is not None and record.process() is not None:
        end_node(record.pid)


def test_a_node_has_a_session_of_its_own_and_is_nobodys_child(agent: Agent) -> None:
    state = asyncio.run(agent.start())
    assert (state.node, state.adopted, living_node()) == ("new", False, "new")
    assert os.getsid(state.pid) != os.getsid(0)
    assert state.pid not in {child.pid for child in psutil.Process().children(recursive=True)}
    options = last_lines(Path(state.log)).partition(" ")[2]
    assert options == f"--record {agent.record} --devices gpu:0,cpu --labels rack=a"
    assert asyncio.run(agent.start()) == state, "it is there already"


def test_the_next_actor_adopts_the_node(agent: Agent) -> None:
    state = asyncio.run(agent.start())
    agent.release()  # as its end does
    other = new_agent(OPTIONS)
    adopted = asyncio.run(other.start())
    assert (adopted.pid, adopted.adopted) == (state.pid, True)
    other.release()


def test_two_actors_do_not_share_a_home(agent: Agent) -> None:
    asyncio.run(agent.start())
    with pytest.raises(HostError, match="another actor runs a node in") as refused:
        asyncio.run(new_agent(OPTIONS).start())
    assert "CRUCIBLE_HOME of its own" in refused.value.next_step


def test_an_old_record_is_not_adopted(agent: Agent) -> None:
    write_record(agent.record, NodeRecord(node="old", pid=os.getpid(), started_s=1.0))
    assert living_node() == ""
    assert asyncio.run(agent.start()).node == "new"


def test_a_node_that_ends_at_once_says_why() -> None:
    agent = new_agent(AgentOptions(("cpu",), command=("-c", "raise SystemExit('no such device')")))
    with pytest.raises(
        HostError, match=r"ended before it took jobs; its log ends with:\nno such device"
    ):
        asyncio.run(agent.start())
    agent.release()


def test_the_end_of_a_node_is_told(agent: Agent) -> None:
    async def run() -> str:
        state = await agent.start()
        watching = asyncio.create_task(agent.watch())
        await asyncio.sleep(0)
        assert not watching.done()
        os.kill(state.pid, signal.SIGKILL)
        return await watching

    assert asyncio.run(run()).startswith("options --record")


def test_a_node_is_stopped(agent: Agent) -> None:
    async def run() -> None:
        await agent.start()
        await agent.stop(60.0)
        assert agent.current is not None
        assert agent.current.process() is None
        await agent.stop(60.0)

    asyncio.run(run())
    assert living_node() == ""


def test_a_node_that_does_not_stop_is_killed() -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + NODE
    agent = new_agent(AgentOptions(("cpu",), command=("-c", deaf)))

    async def run() -> None:
        await agent.start()
        await agent.stop(0.5)

    asyncio.run(run())
    assert living_node() == ""
    agent.release()


def test_a_host_needs_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CRUCIBLE_SERVICE_DATABASE_URL is not set" in settings_fault()
    monkeypatch.setenv("CRUCIBLE_SERVICE_DATABASE_URL", "postgresql+psycopg://a@b/c")
    assert settings_fault() == ""
    monkeypatch.setenv("CRUCIBLE_SERVICE_DATABASE", "x")
    assert "no setting CRUCIBLE_SERVICE_DATABASE" in settings_fault()
