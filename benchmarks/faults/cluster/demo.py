"""A whole cluster on this machine, with a live table: `make cluster-demo`.

It starts PostgreSQL, the double of S3, Ray with two hosts, two API servers and HAProxy, compiles
the digits for two targets, serves the winner at both servers, and kills one of each while a client
keeps asking. The exit code is 1 if an answer was wrong or missing.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from benchmarks.common import ROOT
from benchmarks.faults.cluster.cluster import BUCKET, FILES_URL, answers
from benchmarks.faults.cluster.gateway import kept_port
from benchmarks.faults.cluster.program import Program
from benchmarks.serving.crucible import is_ready, own_environment
from pipeline.formatting import time_text
from service.client import Client, RemoteError, Unreachable
from service.cluster.record import read_record
from service.http.schemas import CompileView
from service.jobs.nodes import Nodes
from service.storage.database import Database
from tests.service.builders.postgresql import DURABLE, Server, running_server
from tests.service.cluster.ray_cluster import RayCluster, end_node, running_ray

MODEL = "digits"
TARGETS = [
    {"name": "one-thread", "device": "cpu", "threads": 1, "labels": ["ray"]},
    {"name": "two-threads", "device": "cpu", "threads": 2, "labels": ["ray"]},
]
HOSTS = ("ray-1", "ray-2")
START_S, COMPILE_S, HEAL_S, ANSWER_S = 300.0, 1200.0, 180.0, 60.0
PAUSE_S = 0.2


class Late(RuntimeError):
    """Something has not happened in time."""


@dataclass
class Asked:
    """What a client that keeps asking has got."""

    answered: int = 0
    repeated: int = 0  # requests that needed another try
    wrong: int = 0
    missing: int = 0  # without an answer for ANSWER_S
    slowest_s: float = 0.0


@dataclass
class Demo:
    """The cluster, and what the table shows."""

    folder: Path
    postgresql: Server
    url: str
    ray: RayCluster
    events: list[str] = field(default_factory=list)
    asked: Asked = field(default_factory=Asked)
    began_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.database = Database(self.url)
        self.ports = {"api-1": kept_port(), "api-2": kept_port(), "proxy": kept_port()}
        self.s3_port = kept_port()
        self.programs = {"S3": self._s3()} | {
            name: self._server(name, port) for name, port in self.ports.items() if name != "proxy"
        }
        command = ("proxy", "start", "--from-database", f"--port={self.ports['proxy']}")
        self.programs["proxy"] = self._crucible("proxy", command, {})
        supervisor = ("ray", "start", f"--address={self.ray.address}", "--min=2", "--labels=ray")
        # so that it sees the loss of the head soon
        soon = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
        self.programs["supervisor"] = self._crucible("supervisor", supervisor, soon)
        self.state = dict.fromkeys((*self.programs, "Ray head", *HOSTS, "PostgreSQL"), "")

    # -- processes -------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        return {
            **own_environment(),
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.s3_port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "CRUCIBLE_SERVICE_DATABASE_URL": self.url,
            "CRUCIBLE_SERVICE_FILES_URL": FILES_URL,
        }

    def _crucible(self, name: str, words: tuple[str, ...], more: Mapping[str, str]) -> Program:
        home = {"CRUCIBLE_HOME": str(self.folder / name)}
        command = [sys.executable, "-m", "pipeline.cli", *words]
        return Program(command, self.folder / f"{name}.log", {**self.environment, **home, **more})

    def _server(self, name: str, port: int) -> Program:
        return self._crucible(
            name,
            ("serve", f"--home={self.folder / name / 'service'}", f"--port={port}"),
            {"CRUCIBLE_SERVICE_CONFIGS": str(self.folder / "configs")},
        )

    def _s3(self) -> Program:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.s3_port)]
        return Program(command, self.folder / "S3.log", own_environment())

    def start(self) -> None:
        """Start all; they are ready on return."""
        write_plans(self.folder / "configs")
        self.programs["S3"].start()
        self.until(lambda: answers(f"http://127.0.0.1:{self.s3_port}/"), "S3 answers", START_S)
        httpx.put(f"http://127.0.0.1:{self.s3_port}/{BUCKET}").raise_for_status()
        for host in HOSTS:
            self.join(host)
        for name in ("api-1", "api-2", "proxy", "supervisor"):
            self.programs[name].start()
        self.until(self.is_whole, "servers, proxy and Ray's nodes are ready", START_S)

    def join(self, host: str) -> None:
        home = {"CRUCIBLE_HOME": str(self.folder / host)}
        self.ray.join(host, "pool=crucible", {**self.environment, **home})

    def close(self) -> None:
        for program in self.programs.values():
            program.close()
        for host in HOSTS:
            if (process_id := self.node_of(host)) is not None:
                end_node(process_id)
        self.database.close()

    # -- what is there ---------------------------------------------------------------------

    def node_of(self, host: str) -> int | None:
        """The process of the node of a Ray host, if it lives."""
        for file in (self.folder / host).rglob("*.json"):
            record = read_record(file)
            if record is not None and record.process() is not None:
                return record.pid
        return None

    def is_whole(self) -> bool:
        """Whether all are there, and servers that shall serve the model do."""
        ready = [is_ready(port) for port in self.ports.values()]
        nodes = [self.node_of(host) for host in HOSTS]
        live = [node for node in Nodes(self.database, "", "node").list() if node.is_live]
        kinds = [node.kind for node in live]
        return all(ready) and None not in nodes and kinds.count("node") >= 2

    def look(self) -> None:
        """Bring the states of the table up to date."""
        for name, port in self.ports.items():
            self.state[name] = "answers" if is_ready(port) else "away"
        for host in HOSTS:
            process_id = self.node_of(host)
            self.state[host] = f"node, process {process_id}" if process_id else "no node"

    def table(self) -> Group:
        whole = Table(title="cluster", show_header=True)
        for column in ("part", "state", "starts"):
            whole.add_column(column)
        for name, state in self.state.items():
            program = self.programs.get(name)
            whole.add_row(name, state, str(program.starts) if program else "")
        asked = self.asked
        counts = (
            f"answers {asked.answered}, of them after another try {asked.repeated}, wrong"
            f" {asked.wrong}, missing {asked.missing}, slowest {time_text(asked.slowest_s)}"
        )
        return Group(whole, counts, *self.events[-12:])

    def say(self, text: str) -> None:
        self.events.append(f"{time.monotonic() - self.began_s:6.1f} s  {text}")

    def until(self, reached: Callable[[], bool], what: str, within_s: float = HEAL_S) -> None:
        """Wait, and say how long it took."""
        begin = time.monotonic()
        while not reached():
            if time.monotonic() - begin > within_s:
                raise Late(f"not within {within_s:g} s: {what}")
            time.sleep(PAUSE_S)
        self.say(f"{what} after {time.monotonic() - begin:.1f} s")

    # -- the story -------------------------------------------------------------------------

    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.ports['proxy']}")

    def compile(self, name: str) -> CompileView:
        """Compile one of the plans for both targets."""
        with self.client() as client:
            added = client.submit_config(name)
            assert isinstance(added, CompileView)
            self.say(f"compiling {name} for {', '.join(each.name for each in added.targets)}")
            view = added
            for view in client.follow_compile(added.id, COMPILE_S):
                states = ", ".join(f"{each.name} {each.job.state}" for each in view.targets)
                self.state["compile"] = states
            for each in view.targets:
                self.say(f"{name}, {each.name}: {each.outcome}")
            return view

    def serve(self, view: CompileView) -> None:
        """Promote and load the engine of the first target that has one, at both servers."""
        with self.client() as client:
            for target in view.targets:
                with contextlib.suppress(RemoteError):
                    client.promote(MODEL, target.job.id, override=True)
                    client.load(MODEL)
                    model = client.model(MODEL)
                    self.say(f"{target.name} is served by {len(model.servers)} servers")
                    return
        raise Late("no target has an engine that can be served")

    def serves(self) -> bool:
        """Whether both servers have the model."""
        try:
            with self.client() as client:
                servers = client.model(MODEL).servers
        except (RemoteError, Unreachable):
            return False
        ready = [server for server in servers if server.state == "ready"]
        return self.is_whole() and len(ready) >= 2

    def kill_one_of_each(self) -> None:
        """Kill each part in turn, and wait until all is whole again."""
        kills: tuple[tuple[str, Callable[[], object]], ...] = (
            ("an API server", self.programs["api-1"].kill_all),
            ("the proxy", self.programs["proxy"].kill),
            ("a node", lambda: end_node(self.node_of("ray-1") or 0)),
            ("a Ray host", lambda: self.restart_ray("ray-2")),
            ("the head of Ray with its hosts", lambda: self.restart_ray(*HOSTS, head=True)),
            ("PostgreSQL", self.restart_postgresql),
        )
        for name, kill in kills:
            self.say(f"killing {name}")
            kill()
            time.sleep(1.0)
            self.until(self.serves, "all is whole again")

    def restart_ray(self, *hosts: str, head: bool = False) -> None:
        """Kill Ray on hosts, and start it again. A new head does not start beside old hosts."""
        for host in hosts:
            self.ray.hosts[host].close()
        if head:
            self.ray.restart_head()
        for host in hosts:
            self.join(host)

    def restart_postgresql(self) -> None:
        self.postgresql.stop()
        self.postgresql.start()

    def keep_asking(self, done: threading.Event) -> None:
        """Ask for answers about one image until `done`, and compare them with the first."""
        with np.load(ROOT / "calibration_data" / "digits" / "validation.npz") as stored:
            image = stored["image"][:1]
        wanted: list[Any] = []
        with httpx.Client(base_url=f"http://127.0.0.1:{self.ports['proxy']}") as http:
            while not done.is_set():
                self.ask(http, {"inputs": {"image": image.tolist()}}, wanted)
                time.sleep(PAUSE_S)

    def ask(self, http: httpx.Client, body: Mapping[str, Any], wanted: list[Any]) -> None:
        begin, tries = time.monotonic(), 0
        while time.monotonic() - begin < ANSWER_S:
            tries += 1
            with contextlib.suppress(httpx.TransportError):
                answer = http.post(f"/models/{MODEL}/infer", json=body, timeout=10.0)
                if answer.is_success:
                    logits = next(iter(answer.json()["outputs"].values()))
                    if not wanted:
                        wanted.append(logits)
                    self.asked.answered += 1
                    self.asked.repeated += tries > 1
                    self.asked.wrong += not np.allclose(logits, wanted[0], atol=1e-3)
                    took_s = time.monotonic() - begin
                    self.asked.slowest_s = max(self.asked.slowest_s, took_s)
                    return
            time.sleep(PAUSE_S)
        self.asked.missing += 1

    def run(self) -> None:
        """The whole story."""
        self.start()
        self.serve(self.compile(MODEL))
        done = threading.Event()
        asking = threading.Thread(target=self.keep_asking, args=(done,))
        asking.start()
        try:
            self.until(self.serves, "both servers serve the model")
            again = threading.Thread(target=self.compile, args=(f"{MODEL}-again",))
            again.start()
            self.kill_one_of_each()
            again.join()
        finally:
            done.set()
            asking.join()


def write_plans(folder: Path) -> None:
    """Write the plan of the digits for two targets twice, so that the second one builds again."""
    plan = yaml.safe_load((ROOT / "configs" / "digits.yaml").read_text(encoding="utf-8"))
    for section in ("model", "data"):
        for key, value in plan[section].items():
            if isinstance(value, str) and value.startswith("../"):
                plan[section][key] = str((ROOT / "configs" / value).resolve())
    folder.mkdir()
    for name, seconds in ((MODEL, 10), (f"{MODEL}-again", 11)):
        plan["benchmark"]["budget_s"] = seconds
        text = yaml.safe_dump({**plan, "targets": TARGETS}, sort_keys=False)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


@contextlib.contextmanager
def opened() -> Iterator[Demo]:
    """A demo in a short folder: the sockets of Ray need that."""
    folder = Path(tempfile.mkdtemp(prefix="cluster-"))
    (folder / "ray").mkdir()
    try:
        with (
            running_server(DURABLE) as postgresql,
            postgresql.database() as url,
            running_ray(folder / "ray") as ray,
        ):
            demo = Demo(folder, postgresql, url, ray)
            try:
                yield demo
            finally:
                demo.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run the demo. Returns its exit code."""
    console = Console()
    with opened() as demo:
        with Live(console=console, get_renderable=demo.table, refresh_per_second=2):
            story = threading.Thread(target=_told, args=(demo,))
            story.start()
            while story.is_alive():
                demo.look()
                story.join(1.0)
        for event in demo.events:
            console.print(event, highlight=False)
        asked = demo.asked
        console.print(
            f"{asked.answered} answers, {asked.repeated} after another try, {asked.wrong} wrong,"
            f" {asked.missing} missing, the slowest after {time_text(asked.slowest_s)}"
        )
        return int("failed" in demo.state or asked.wrong + asked.missing > 0 or not asked.answered)


def _told(demo: Demo) -> None:
    try:
        demo.run()
    except Exception as error:  # noqa: BLE001  shown in the table, and as the exit code
        demo.state["failed"] = str(error)
        demo.say(f"failed: {error}")


if __name__ == "__main__":
    sys.exit(main())
