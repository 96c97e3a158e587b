"""What a proxy before servers costs, and how the rate grows with the servers behind it.

    python -m benchmarks replicas [--parts latency,growth] [--servers N,N] [--seconds S]
                                  [--client-cores N] [--proxy-cores N] [--into DIR]

latency  one request at a time, in turn straight to a server and through `crucible proxy start`
growth   1, 2 ... servers behind one proxy, each on 2 cores of its own. Proxy and clients have other
         cores, so this part needs cores for all

A request is one uint8 image of 150 KB, and the model reads one pixel of it: servers and proxy are
measured, and no engine. `*_cores` are CPU seconds for each second, of the proxy, of all servers and
of the clients. Needs HAProxy. Minutes: 3.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import psutil

from benchmarks.common import RESULTS, Row, argument_parser
from benchmarks.limits import serving_ceiling
from benchmarks.limits.part_results import measure_parts
from benchmarks.limits.serving_ceiling import Asked, Setting, closed, core_sets, count_of, on_cores
from benchmarks.serving.client import ask_once, http_request
from benchmarks.serving.crucible import MODEL, Served, is_ready, own_environment, serving
from benchmarks.serving.models import oip_body, write_first_pixel
from benchmarks.serving.processes import cpu_of, free_port, running, wait_until
from service.client import Client
from service.registry.models import DeploymentOptions

NAME = "replicas"
IMAGES = 1  # of a request
ANSWER_BYTES = IMAGES * 3 * 4  # pixels in fp32
CORES = 2  # of a server
CONNECTIONS = 8  # for each server
ROUNDS = 7
ADDED_MS = 1.0
NEAR = 0.9


@dataclass(frozen=True, slots=True)
class Cores:
    """Which process runs where. All have all cores where there are not enough."""

    servers: tuple[frozenset[int], ...]  # of each one
    proxy: frozenset[int]
    clients: frozenset[int]

    @classmethod
    def of(cls, all_cores: frozenset[int], clients: int, proxy: int) -> Cores:
        rest, last = core_sets(all_cores, clients)
        rest, middle = core_sets(rest, proxy)
        ordered = sorted(rest)
        pairs = [ordered[at : at + CORES] for at in range(0, len(ordered) - CORES + 1, CORES)]
        return cls(tuple(map(frozenset, pairs)), middle, last)

    @property
    def are_apart(self) -> bool:
        return not (self.proxy & self.clients or self.proxy & frozenset[int]().union(*self.servers))


def main(words: Sequence[str]) -> None:
    parser = argument_parser(NAME, __doc__)
    parser.add_argument("--parts", type=_parts, default=("latency", "growth"), metavar="PART,PART")
    parser.add_argument("--servers", type=serving_ceiling.numbers, default=(1, 2, 4, 5))
    parser.add_argument("--seconds", type=float, default=4.0, help="of a stretch [%(default)s]")
    parser.add_argument(
        "--client-cores", type=count_of, default=4, metavar="N", help="[%(default)s]"
    )
    parser.add_argument(
        "--proxy-cores", type=count_of, default=2, metavar="N", help="[%(default)s]"
    )
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--limit", type=float, default=420.0, metavar="SECONDS", help="[420]")
    arguments = parser.parse_args(words)
    every = frozenset(os.sched_getaffinity(0))
    cores = Cores.of(every, arguments.client_cores, arguments.proxy_cores)
    with tempfile.TemporaryDirectory(prefix="crucible-replicas-") as text:
        setting = setting_in(Path(text), arguments.seconds, cores)
        work: dict[str, Callable[[Setting, Cores], list[Row]]]
        work = {"latency": latency_part, "growth": partial(growth_part, counts=arguments.servers)}
        chosen = {name: partial(work[name], setting, cores) for name in arguments.parts}
        run: Row = {
            "seconds": arguments.seconds,
            "client_cores": len(cores.clients),
            "proxy_cores": len(cores.proxy),
        }
        measure_parts(NAME, chosen, targets_of, arguments.into, arguments.limit, run)


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := [part for part in parts if part not in ("latency", "growth")]:
        raise argparse.ArgumentTypeError(f"no part '{unknown[0]}'; expected latency, growth")
    return parts


def setting_in(folder: Path, seconds: float, cores: Cores) -> Setting:
    return Setting(
        backend="onnxruntime",
        images=IMAGES,
        seconds=seconds,
        connections=(1,),
        instances=1,
        http_processes=1,
        server=frozenset(),
        clients=cores.clients,
        homes=folder,
        folder=folder,
    )


# -- the parts ---------------------------------------------------------------


def latency_part(setting: Setting, cores: Cores) -> list[Row]:
    """The median of rounds in turn, straight and by the proxy."""
    alone = replace(setting, clients=frozenset(sorted(cores.clients)[:1]))
    p50s: dict[str, list[float]] = {"straight": [], "proxy": []}
    with (
        servers(setting, cores.servers[:1]) as (served,),
        proxied([served], setting, cores) as (
            process,
            port,
        ),
    ):
        asked = {
            "straight": asked_of(served.process, served.port),
            "proxy": asked_of(process, port),
        }
        for each in asked.values():
            closed(each, 1, setting.seconds / 4, alone)
        for _ in range(ROUNDS):
            for way, each in asked.items():
                found = closed(each, 1, setting.seconds / 4, alone)["p50_ms"]
                p50s[way].append(float(found or 0))
    added = median(p50s["proxy"]) - median(p50s["straight"])
    return [
        {
            "way": way,
            "p50_ms": median(found),
            "fastest_p50_ms": min(found),
            "slowest_p50_ms": max(found),
            "added_ms": added if way == "proxy" else None,
        }
        for way, found in p50s.items()
    ]


def growth_part(setting: Setting, cores: Cores, counts: Sequence[int]) -> list[Row]:
    """A row for each number of servers behind the proxy, and one of a server without it."""
    if not cores.are_apart or max(counts) > len(cores.servers):
        needed = max(counts) * CORES + len(cores.proxy) + len(cores.clients)
        return [{"note": f"needs {needed} cores: on fewer, servers, proxy and clients share them"}]
    rows: list[Row] = []
    with servers(setting, cores.servers[: max(counts)]) as found:
        first = asked_of(found[0].process, found[0].port)
        rows.append(row_of(0, first, found[:1], setting))
        for count in counts:
            with proxied(found[:count], setting, cores) as (process, port):
                rows.append(row_of(count, asked_of(process, port), found[:count], setting))
    rate = float(rows[1]["requests_per_s"] or 0)
    return [
        {**row, "times_one": float(row["requests_per_s"] or 0) / rate if row["servers"] else None}
        for row in rows
    ]


def row_of(count: int, asked: Asked, found: Sequence[Served], setting: Setting) -> Row:
    """The rate of this number of servers behind the proxy; 0: of one server without it."""
    connections = CONNECTIONS * len(found)
    closed(asked, connections, setting.seconds / 4, setting)
    before = cpu_seconds(found)
    stretch = closed(asked, connections, setting.seconds, setting)
    servers_s = cpu_seconds(found) - before
    proxy_cores = float(stretch["api_cores"] or 0) + float(stretch["rest_cores"] or 0)
    return {
        "servers": count,
        "connections": connections,
        "requests_per_s": stretch["requests_per_s"],
        "p50_ms": stretch["p50_ms"],
        "p99_ms": stretch["p99_ms"],
        "proxy_cores": proxy_cores if count else None,
        "servers_cores": servers_s / setting.seconds,
        "client_cores": stretch["client_cores"],
        "note": stretch["note"],
    }


def cpu_seconds(found: Sequence[Served]) -> float:
    times = [cpu_of(served.process, served.port) for served in found]
    return sum(each.api_s + each.rest_s for each in times)


def targets_of(rows: Sequence[Row]) -> dict[str, bool]:
    targets: dict[str, bool] = {}
    for row in rows:
        if (added := row.get("added_ms")) is not None:
            goal = f"the proxy adds at most {ADDED_MS:g} ms to a request (got {float(added):.2f})"
            targets[goal] = float(added) <= ADDED_MS
    grown = [row for row in rows if row.get("times_one")]
    if grown:
        last = max(grown, key=lambda row: int(row["servers"] or 0))
        count, times = int(last["servers"] or 0), float(last["times_one"] or 0)
        goal = f"{count} servers give at least {NEAR:.0%} of {count} times one"
        targets[f"{goal} (got {times:.2f})"] = times >= NEAR * count
    return targets


# -- servers and proxy -------------------------------------------------------


@contextlib.contextmanager
def servers(setting: Setting, cores: Sequence[frozenset[int]]) -> Iterator[list[Served]]:
    """A server on each of these sets of cores, with a home of its own and the same engine."""
    model = write_first_pixel(setting.folder / "first_pixel.onnx", serving_ceiling.SIDE)
    first = setting.home("server-0")
    plan: Mapping[str, object] = {
        **serving_ceiling.plan_of("first_pixel", IMAGES),
        "candidates": [serving_ceiling.IDLE],
    }
    serving_ceiling.compiled(first, model, plan)
    options = DeploymentOptions(instances=1, max_batch=IMAGES, max_delay_s=0.0)
    with contextlib.ExitStack() as stack:
        found = []
        for number, own in enumerate(cores):
            home = setting.home(f"server-{number}")
            if not home.exists():
                shutil.copytree(first, home)
            with on_cores(own):
                served = stack.enter_context(serving(home))
            with Client(served.url) as client:
                client.load(MODEL, options)
            found.append(served)
        yield found


@contextlib.contextmanager
def proxied(
    found: Sequence[Served], setting: Setting, cores: Cores
) -> Iterator[tuple[psutil.Process, int]]:
    """The proxy before these servers, and its port."""
    port, log = free_port(), setting.folder / "proxy.log"
    command = [sys.executable, "-m", "pipeline.cli", "proxy", "start", f"--port={port}"]
    command += [f"--home={setting.folder / 'proxy'}"]
    command += [word for served in found for word in ("--server", f"127.0.0.1:{served.port}")]
    with on_cores(cores.proxy), running(command, log, own_environment()) as process:
        wait_until(lambda: is_ready(port), process, log)
        yield process, port


def asked_of(process: psutil.Process, port: int) -> Asked:
    """One image, and what a server answers to it."""
    body, headers = oip_body(serving_ceiling.images_of(IMAGES))
    request = http_request(port, f"/v2/models/{MODEL}/infer", body, headers)
    status, _, answer = ask_once(port, request)
    if status != 200:
        raise RuntimeError(f"status {status}: {answer[:300].decode(errors='replace')}")
    return Asked(process, port, request, answer[-ANSWER_BYTES:])
