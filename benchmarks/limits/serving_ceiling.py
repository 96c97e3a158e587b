"""How much goes through the server: requests of 64 uint8 images, 9.6 MB, over loopback HTTP.

    python -m benchmarks serving_ceiling [--parts sink,idle,processes,engine,direct,open]
                                         [--backend tensorrt] [--images N] [--seconds S]
                                         [--connections N,N] [--client-cores N]
                                         [--instances N] [--http-processes N]
                                         [--home DIR] [--into DIR]

sink    a server that reads the requests and keeps nothing: what loopback and one event loop carry
idle    `crucible serve` with a model that reads one pixel of each image, on the CPU: the way of a
        request through API process, shared memory and worker
processes
        the same with `--http-processes` processes that read the requests. `engine` and `open`
        have them too
engine  `crucible serve` with ResNet-50 and `preprocess`: int8 on the GPU, fp32 on the CPU
direct  the engine of the part before in direct Sessions, from arrays of `input_buffer` to arrays
open    p50 and p99 of that server at 70 % of its rate, asked at random times: a latency counts from
        when its request was due

Clients are processes of their own on `--client-cores` cores, each with its share of the
connections; the server has the other cores. Rates are of a stretch of `--seconds` for each number
of connections. `*_cores` are CPU seconds for each second of it: of the process that listens, of all
others of the server, and of the clients.

Minutes: sink 0.5, idle 1, processes 0.5, engine 1 and a compile (3 on an H100, once for each
`--home`), direct 0.5, open 0.5. All end after --limit seconds (420): what is not done then has
no result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.common import RESULTS, ROOT, Row, argument_parser
from benchmarks.limits.part_results import measure_parts
from benchmarks.serving.client import ask_once, http_request
from benchmarks.serving.crucible import (
    MODEL,
    deploy,
    engine_folder,
    own_environment,
    serving,
)
from benchmarks.serving.figures import STAGES, percentile_99
from benchmarks.serving.models import INPUT, oip_body, write_cnn, write_first_pixel
from benchmarks.serving.processes import Cpu, cpu_of, free_port, running, wait_until
from benchmarks.serving.rounds import tolerance_of
from benchmarks.serving.setups import BACKENDS, Backend
from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.core.progress import Progress, silent
from pipeline.execution.child_process import TimeLimit, call_in_child
from pipeline.measurement.clock import WarmUpOptions, measure_block, warm_up
from pipeline.report.bundle import load_engine
from service.client import Client
from service.registry.models import DeploymentOptions

NAME = "serving_ceiling"
HERE = Path(__file__).parent
CLIENT = ROOT / "benchmarks" / "serving" / "client.py"
SIDE, CLASSES = 224, 1000
WARM_UP_S = 1.0
OPEN_SHARE = 0.7  # of the best rate
DIRECT_SESSIONS = (1, 2, 3)
DIRECT_LIMIT_S = 120.0
NEAR = 0.8  # of the limit
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
IDLE = {"backend": "onnxruntime", "precision": "fp32"}
JOB = "benchmark_job"  # a file in a home


@dataclass(frozen=True, slots=True)
class Setting:
    """What the command line asks for."""

    backend: Backend
    images: int  # of one request
    seconds: float  # of a stretch
    connections: tuple[int, ...]
    instances: int
    http_processes: int
    server: frozenset[int]  # cores
    clients: frozenset[int]
    homes: Path
    folder: Path  # for files that are not kept

    def home(self, name: str) -> Path:
        """A server's home for each model and batch."""
        return self.homes / f"{name}_{self.backend}_b{self.images}"


@dataclass(frozen=True, slots=True)
class Asked:
    """A server that runs, and what it is asked."""

    process: psutil.Process
    port: int
    request: bytes
    expected: bytes  # float32, what every answer ends with


# -- the parts ---------------------------------------------------------------


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    with tempfile.TemporaryDirectory(prefix="crucible-ceiling-") as text:
        setting = setting_from(arguments, Path(text))
        chosen = {name: partial(PARTS[name], setting) for name in PARTS if name in arguments.parts}
        run: dict[str, str | float | int] = {
            "backend": setting.backend,
            "images": setting.images,
            "seconds": setting.seconds,
            "server_cores": len(setting.server),
            "client_cores": len(setting.clients),
            "instances": setting.instances,
            "http_processes": setting.http_processes,
        }
        measure_parts(NAME, chosen, targets_of, arguments.into, arguments.limit, run)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser(NAME, __doc__)
    parser.add_argument("--parts", type=_parts, default=tuple(PARTS), metavar="PART,PART")
    parser.add_argument("--backend", choices=BACKENDS, default="tensorrt", help="of `engine`")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a stretch [%(default)s]")
    add_server_arguments(parser, connections=(2, 6, 12))
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--limit", type=float, default=420.0, metavar="SECONDS", help="[420]")
    return parser.parse_args(words)


def add_server_arguments(parser: argparse.ArgumentParser, connections: tuple[int, ...]) -> None:
    """Add the options of the server and of its clients."""
    parser.add_argument("--images", type=count_of, default=64, help="of one request [%(default)s]")
    parser.add_argument(
        "--connections",
        type=numbers,
        default=connections,
        metavar="N,N",
        help=f"[{','.join(map(str, connections))}]",
    )
    parser.add_argument(
        "--client-cores", type=count_of, default=6, metavar="N", help="[%(default)s]"
    )
    parser.add_argument(
        "--instances", type=count_of, default=2, metavar="N", help="of the model [%(default)s]"
    )
    parser.add_argument(
        "--http-processes",
        type=count_of,
        default=4,
        metavar="N",
        help="of the server [%(default)s]",
    )
    parser.add_argument(
        "--home",
        type=Path,
        help="of the servers; kept, so that a second run compiles nothing [default: temporary]",
    )


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := [part for part in parts if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part '{unknown[0]}'; expected {', '.join(PARTS)}")
    return parts


def count_of(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got '{text}'")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(count_of, text.split(",")))


def setting_from(arguments: argparse.Namespace, folder: Path) -> Setting:
    server, clients = core_sets(os.sched_getaffinity(0), arguments.client_cores)
    return Setting(
        arguments.backend,
        arguments.images,
        arguments.seconds,
        arguments.connections,
        arguments.instances,
        arguments.http_processes,
        server,
        clients,
        arguments.home or folder,
        folder,
    )


def sink_part(setting: Setting) -> list[Row]:
    port, log, size = free_port(), setting.folder / "sink.log", setting.images * CLASSES * 4
    command = [sys.executable, str(HERE / "sink.py"), str(port), str(size)]
    request = http_request(port, "/", images_of(setting.images).tobytes())
    with on_cores(setting.server), running(command, log, own_environment()) as process:
        wait_until(lambda: is_listening(port), process, log)
        return closed_rows(Asked(process, port, request, bytes(size)), setting)


def idle_part(setting: Setting, http_processes: int = 1) -> list[Row]:
    model = write_first_pixel(setting.folder / "idle.onnx", SIDE)
    plan = {**plan_of("idle", setting.images), "candidates": [IDLE]}
    with deployed(setting.home("idle"), model, plan, setting, http_processes) as asked:
        return closed_rows(asked, setting)


def processes_part(setting: Setting) -> list[Row]:
    return idle_part(setting, setting.http_processes)


def engine_part(setting: Setting) -> list[Row]:
    with served_engine(setting) as asked:
        return closed_rows(asked, setting)


def direct_part(setting: Setting) -> list[Row]:
    """The rate of each number of Sessions on the server's cores."""
    home = setting.home("engine")
    if not delivered(home):
        with served_engine(setting):  # compiles it
            pass
    with on_cores(setting.server):
        rates = call_in_child(
            direct_rates,
            delivered(home),
            setting.images,
            setting.seconds,
            name="direct",
            limit=TimeLimit(DIRECT_LIMIT_S),
        )
    return [
        {"sessions": count, **rate_columns(rate, setting.images)} for count, rate in rates.items()
    ]


def open_part(setting: Setting) -> list[Row]:
    """At a share of the best rate of a closed loop, which the same server takes first."""
    with served_engine(setting) as asked:
        return [opened(asked, OPEN_SHARE * best(closed_rows(asked, setting)), setting)]


PARTS: Mapping[str, Callable[[Setting], list[Row]]] = {
    "sink": sink_part,
    "idle": idle_part,
    "processes": processes_part,
    "engine": engine_part,
    "direct": direct_part,
    "open": open_part,
}


# -- servers -----------------------------------------------------------------


def plan_of(name: str, images: int) -> dict[str, Any]:
    """What all models share: one size, and little time for what is measured here anyway."""
    return {
        "name": name,
        "profiles": [{"batch": [1, images, images]}],
        "fallback": False,
        "benchmark": {"sizes": [{"batch": images}], "duration_s": 0.3, "budget_s": 10},
    }


def engine_plan(setting: Setting) -> dict[str, Any]:
    plan = {
        **plan_of("engine", setting.images),
        "preprocess": {INPUT: {"mean": MEAN, "std": STD}},
    }
    if setting.backend != "tensorrt":
        return {**plan, "candidates": [{"backend": setting.backend, "precision": "fp32"}]}
    data = {"generate": "random", "samples": 64, "because": "for speed only"}
    int8 = {"backend": "tensorrt", "precision": "int8"}
    return {**plan, "candidates": [int8], "data": {"calibration": data}}


@contextlib.contextmanager
def served_engine(setting: Setting) -> Iterator[Asked]:
    """ResNet-50 with `preprocess`, served."""
    home, model = setting.home("engine"), setting.folder / "engine.onnx"
    if not delivered(home):
        write_cnn(model, "resnet50", SIDE)
    with deployed(home, model, engine_plan(setting), setting, setting.http_processes) as asked:
        yield asked


@contextlib.contextmanager
def deployed(
    home: Path, model: Path, plan: Mapping[str, Any], setting: Setting, http_processes: int
) -> Iterator[Asked]:
    """The model served on the server's cores. It is compiled first, with all cores, unless the home
    holds it.
    """
    compiled(home, model, plan)
    options = DeploymentOptions(
        instances=setting.instances, max_batch=setting.images, max_delay_s=0.0
    )
    with on_cores(setting.server), serving(home, http_processes) as served:
        with Client(served.url) as client:
            client.load(MODEL, options)
        body, headers = oip_body(images_of(setting.images))
        path = f"/v2/models/{MODEL}/infer"
        request = http_request(served.port, path, body, headers)
        status, _, answer = ask_once(served.port, request)
        if status != 200:
            raise RuntimeError(f"status {status}: {answer[:300].decode(errors='replace')}")
        columns = load_engine(Path(delivered(home))).outputs[0].shape[-1]
        size = setting.images * int(columns) * 4
        yield Asked(served.process, served.port, request, answer[-size:])


def compiled(home: Path, model: Path, plan: Mapping[str, Any]) -> str:
    """The job whose engine is deployed in this home. It is compiled unless the home holds it."""
    if not delivered(home):
        home.mkdir(parents=True, exist_ok=True)
        with serving(home) as served, Client(served.url) as client:
            job = deploy(client, model, plan)
        (home / JOB).write_text(job, encoding="utf-8")
    return (home / JOB).read_text(encoding="utf-8")


def delivered(home: Path) -> str:
    """The folder of the engine that is deployed in this home; empty if there is none."""
    job = home / JOB
    return str(engine_folder(home, job.read_text(encoding="utf-8"))) if job.is_file() else ""


def direct_rates(
    engine_root: str, images: int, seconds: float, progress: Progress = silent
) -> dict[int, float]:
    """Requests per second of Sessions in threads of one process, by their number."""
    engine = load_engine(Path(engine_root))
    array = images_of(images)
    rates: dict[int, float] = {}
    with ExitStack() as stack:
        loaded = stack.enter_context(closing(backends.load(engine)))
        runs = []
        for count in DIRECT_SESSIONS:
            buffer = backends.input_buffer(engine, INPUT, array.shape)
            buffer[...] = array
            session = stack.enter_context(closing(loaded.session()))
            runs.append(partial(run_session, session, {INPUT: buffer}))
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(partial(warm_up, options=WarmUpOptions(min_s=0.3)), runs))
                times = list(pool.map(partial(measure_block, min_s=seconds / 2), runs))
            rates[count] = sum(len(each) / sum(each) for each in times)
    return rates


def is_listening(port: int) -> bool:
    try:
        ask_once(port, http_request(port, "/", b"."))
    except OSError:
        return False
    return True


# -- clients -----------------------------------------------------------------


def core_sets(cores: Iterable[int], clients: int) -> tuple[frozenset[int], frozenset[int]]:
    """The cores of the server and those of the clients: the last ones. Both have all where there
    are not enough.
    """
    ordered = sorted(cores)
    if clients >= len(ordered):
        return frozenset(ordered), frozenset(ordered)
    return frozenset(ordered[:-clients]), frozenset(ordered[-clients:])


@contextlib.contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Processes that start within stay on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def images_of(count: int) -> NDArray[np.uint8]:
    """[count, 224, 224, 3] pixels."""
    return np.random.default_rng(0).integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)


def closed_rows(asked: Asked, setting: Setting) -> list[Row]:
    """A row for each number of connections, after a short warm-up with the most."""
    closed(asked, max(setting.connections), WARM_UP_S, setting)
    return [
        {"connections": count, **closed(asked, count, setting.seconds, setting)}
        for count in setting.connections
    ]


def closed(asked: Asked, connections: int, seconds: float, setting: Setting) -> Row:
    """Each connection sends its next request when it has an answer."""
    request, expected = setting.folder / "request", setting.folder / "expected"
    request.write_bytes(asked.request)
    expected.write_bytes(asked.expected)
    tolerance = str(tolerance_of(asked.expected))
    files = [str(CLIENT), str(request), str(expected), tolerance, str(asked.port)]
    shares = shares_of(connections, len(setting.clients))
    return measured(asked, [[*files, str(share), str(seconds)] for share in shares], setting)


def opened(asked: Asked, rate: float, setting: Setting) -> Row:
    """Requests come at random times, so many per second."""
    clients, seconds = len(setting.clients), str(2 * setting.seconds)
    request = setting.folder / "request"
    request.write_bytes(asked.request)
    words = ["-m", "benchmarks.limits.open_loop", str(request), str(asked.port)]
    commands = [[*words, str(rate / clients), seconds, str(seed)] for seed in range(clients)]
    return {"asked_per_s": rate, **measured(asked, commands, setting)}


def shares_of(connections: int, processes: int) -> list[int]:
    """Connections of each process; processes without any are left out."""
    whole, rest = divmod(connections, processes)
    return [count for number in range(processes) if (count := whole + (number < rest))]


def measured(asked: Asked, commands: Sequence[Sequence[str]], setting: Setting) -> Row:
    """What clients that run at the same time found, and what that cost."""
    before = cpu_of(asked.process, asked.port)
    with on_cores(setting.clients):
        clients = [
            subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
            for words in commands
        ]
    answers = [json.loads(client.communicate()[0] or "{}") for client in clients]
    cpu = cpu_of(asked.process, asked.port) - before
    if not all(answers):
        raise RuntimeError("a client ended without a result; its message stands above")
    return row_of(answers, cpu, setting.images)


# -- figures -----------------------------------------------------------------


def row_of(answers: Sequence[Mapping[str, Any]], cpu: Cpu, images: int) -> Row:
    """One stretch from what its clients say."""
    latencies = [value for answer in answers for value in answer["latencies_s"]]
    if not latencies:
        raise RuntimeError(f"no right answer: {[answer['first_faults'] for answer in answers]}")
    wall_s = float(np.mean([answer["wall_s"] for answer in answers]))
    p99_s = percentile_99(latencies)
    stages = [answer["stages_ms"] for answer in answers if answer.get("stages_ms")]
    faults = [fault for answer in answers for fault in answer["first_faults"]]
    return {
        **rate_columns(len(latencies) / wall_s, images),
        "p50_ms": statistics.median(latencies) * 1e3,
        "p99_ms": None if p99_s is None else p99_s * 1e3,
        "requests": len(latencies),
        "api_cores": cpu.api_s / wall_s,
        "rest_cores": cpu.rest_s / wall_s,
        "client_cores": sum(answer["cpu_s"] for answer in answers) / wall_s,
        **{
            f"{stage}_ms": statistics.median([each[stage] for each in stages]) if stages else None
            for stage in STAGES
        },
        "note": f"faults: {faults[0][:100]}" if faults else None,
    }


def rate_columns(requests_per_s: float, images: int) -> Row:
    """Images and bytes of a rate of requests."""
    return {
        "requests_per_s": requests_per_s,
        "images_per_s": requests_per_s * images,
        "GB_per_s": requests_per_s * images * SIDE * SIDE * 3 / 1e9,
    }


def best(rows: Sequence[Row]) -> float:
    """The highest rate of requests; 0 without one."""
    return max((float(row.get("requests_per_s") or 0) for row in rows), default=0.0)


def targets_of(rows: Sequence[Row]) -> dict[str, bool]:
    """The server with an idle model reaches most of what loopback carries, and with an engine most
    of what binds. Parts that were not measured have no target.
    """
    rates = {part: best([row for row in rows if row["part"] == part]) for part in PARTS}
    idle = max(("idle", "processes"), key=rates.__getitem__)
    targets: dict[str, bool] = {}
    if rates["sink"] and rates[idle]:
        share = rates[idle] / rates["sink"]
        targets[f"`{idle}` reaches at least {NEAR:.0%} of `sink` (got {share:.0%})"] = share >= NEAR
    if rates[idle] and rates["direct"] and rates["engine"]:
        name, limit = min((idle, rates[idle]), ("direct", rates["direct"]), key=lambda it: it[1])
        share = rates["engine"] / limit
        text = f"the server reaches at least {NEAR:.0%} of `{name}`, which binds (got {share:.0%})"
        targets[text] = share >= NEAR
    return targets
