"""What serving costs: the wire on a model that does almost nothing, and batching on a CNN, for
Crucible and its peers, on this host over loopback.

    python -m benchmarks serving [--rounds N] [--seconds S] [--only NAME ...]
                                 [--cnn NAME --side N --enlarged TIMES] [--into DIR]
    python -m benchmarks serving --backend tensorrt [--max-batch ROWS --max-delay SECONDS]
                                 [the same] [--into DIR]

Servers take turns, each alone on the machine and started anew in every round; rounds go through
them in random order. All are sent the raw bytes of one float32 image and send raw bytes back: bare
ones, or those of the Open Inference Protocol where a server speaks it. The wire: [1, 3, 224, 224],
602 KB, and the same back. The CNN: every server runs one ONNX file in ONNX Runtime with all cores,
joining requests where it can; beside them stands Crucible's engine in a direct Session. Each peer
has an environment of its own under build/serving, made with uv at the first run, which needs a
network.

With `--backend tensorrt` the CNN is a larger one that runs on the GPU, so that the engine takes no
core from server and client. There are no peers then and no network is needed; the result is
serving_gpu.json, with `--instances 2` serving_gpu_instances.json.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, argument_parser, publish
from benchmarks.serving.crucible import deploy, engine_folder, plan_of, serving
from benchmarks.serving.figures import (
    CNN,
    CRUCIBLE,
    DIRECT,
    WIRE,
    Row,
    Wanted,
    engine_base,
    engine_row,
    engine_target,
    missing_row,
    row_of,
    targets_of,
    turns_base,
)
from benchmarks.serving.models import image, write_cnn, write_echo
from benchmarks.serving.peers.shapes import ECHO, MAX_ROWS
from benchmarks.serving.peers_list import FASTAPI, PEERS, installed
from benchmarks.serving.processes import NotStarted
from benchmarks.serving.rounds import (
    Load,
    Start,
    Turn,
    crucible_starter,
    engine_turn,
    expected_of,
    peer_starter,
    tolerance_of,
    turn,
)
from benchmarks.serving.setups import (
    BACKENDS,
    SETUPS,
    Setup,
    ran_on,
    refuse_other_hosts,
    setup_from,
)
from pipeline.errors import BackendUnavailable
from pipeline.host.environment import usable_cores
from pipeline.report.bundle import load_engine
from service.client import Client

BUILD = ROOT / "build" / "serving"
WIRE_SIDE = 224
NAMES = (CRUCIBLE, *(peer.name for peer in PEERS))

Turns = dict[tuple[str, str], list[Turn]]  # by load and server


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    setup = setup_from(arguments)
    try:
        refuse_other_hosts(setup)
    except BackendUnavailable as error:
        sys.exit(f"--backend {setup.backend}: {error}")
    BUILD.mkdir(parents=True, exist_ok=True)
    starters, why = prepared_peers(arguments.only)
    with tempfile.TemporaryDirectory(prefix="crucible-serving-") as text:
        folder = Path(text)
        loads = loads_of(setup, folder)
        engine = None
        if CRUCIBLE in arguments.only:
            homes = {load.name: folder / load.name for load in loads}
            starters[CRUCIBLE] = crucible_starter(homes)
            engine = [
                prepared_home(homes[load.name], model_of(load, folder), setup) for load in loads
            ][-1]
        ran = ran_on(load_engine(engine)) if engine else None
        turns, engines = take_turns(starters, loads, engine, arguments, folder, why)
    rows = placed(rows_from(turns, why, engines, arguments.only), loads, ran)
    targets = targets_of(rows, Wanted.on(usable_cores())) | (
        engine_target(rows, setup.most_per_s) if setup.most_per_s else {}
    )
    run = {"rounds": arguments.rounds, "seconds": arguments.seconds, **setup.described()}
    publish(setup.document, rows, targets, arguments.into, run)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("serving", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds",
        type=float,
        default=6.0,
        help="of each measured stretch; two to a turn; a p99 needs 1,000 answers in all rounds",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=NAMES,
        metavar="NAME",
        help=f"of {', '.join(NAMES)} [default: all, and for tensorrt {CRUCIBLE}]",
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default=BACKENDS[0],
        help="of the CNN's engine; what follows is chosen for it if left out",
    )
    parser.add_argument("--cnn", help="a CNN of torchvision")
    parser.add_argument("--side", type=int, help="of its images")
    parser.add_argument(
        "--enlarged",
        type=int,
        metavar="TIMES",
        help="by which the network first enlarges the image",
    )
    parser.add_argument("--max-batch", type=int, metavar="ROWS", help="that Crucible runs together")
    parser.add_argument(
        "--max-delay",
        type=float,
        dest="max_delay_s",
        metavar="SECONDS",
        help="for which Crucible holds a batch open",
    )
    parser.add_argument(
        "--instances",
        type=int,
        metavar="N",
        help="batches that run at the same time in Crucible",
    )
    parser.add_argument(
        "--into", type=Path, default=RESULTS, metavar="DIR", help="where the result goes"
    )
    arguments = parser.parse_args(words)
    on_gpu = SETUPS[arguments.backend].on_gpu
    arguments.only = arguments.only or ([CRUCIBLE] if on_gpu else list(NAMES))
    if on_gpu and (peers := [name for name in arguments.only if name != CRUCIBLE]):
        parser.error(
            f"--backend {arguments.backend} takes --only {CRUCIBLE}, got {', '.join(peers)}: the"
            " peers run on the CPU; leave --only out"
        )
    return arguments


def loads_of(setup: Setup, folder: Path) -> list[Load]:
    """What is asked; the CNN comes last. Nothing is held against the wire on a GPU, for its peers
    are not there.
    """
    file = write_cnn(folder / "cnn.onnx", setup.cnn, setup.side, setup.enlarged)
    expected = expected_of(file, setup.side)
    cnn = Load(CNN, str(file), setup.side, expected, tolerance_of(expected))
    return (
        [cnn]
        if setup.on_gpu
        else [Load(WIRE, ECHO, WIRE_SIDE, image(WIRE_SIDE).tobytes(), 0.0), cnn]
    )


def model_of(load: Load, folder: Path) -> Path:
    """The file that Crucible compiles."""
    return write_echo(folder / "echo.onnx", load.side) if load.model == ECHO else Path(load.model)


def prepared_peers(names: Sequence[str]) -> tuple[dict[str, Start], dict[str, str]]:
    """How each peer is started, and why those that cannot be are not."""
    starters, why = {}, {}
    for peer in PEERS:
        if peer.name not in names:
            continue
        say(f"environment of {peer.name} {peer.version}")
        try:
            starters[peer.name] = peer_starter(peer, installed(peer, BUILD))
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            why[peer.name] = f"not installed: {getattr(error, 'output', None) or error}"
            say(why[peer.name])
    return starters, why


def prepared_home(home: Path, model: Path, setup: Setup) -> Path:
    """A home in which this model is deployed; its engine's folder."""
    say(f"Crucible compiles {model.name}")
    with serving(home) as served, Client(served.url) as client:
        return engine_folder(
            home,
            deploy(client, model, plan_of(model.stem, MAX_ROWS, setup.backend), setup.options),
        )


def take_turns(
    starters: dict[str, Start],
    loads: Sequence[Load],
    engine: Path | None,
    arguments: argparse.Namespace,
    folder: Path,
    why: dict[str, str],
) -> tuple[Turns, list[dict[str, Any]]]:
    """Round by round, everybody once, in random order: turns of servers, and those of the engine
    without one.

    A server that fails is out from then on, and `why` says so.
    """
    turns: Turns = defaultdict(list)
    engines: list[dict[str, Any]] = []
    order = random.Random(0)
    everybody = [
        *((name, load) for name in starters for load in loads),
        *([(DIRECT, loads[-1])] if engine else []),
    ]
    for number in range(arguments.rounds):
        for name, load in order.sample(everybody, len(everybody)):
            if name in why:
                continue
            message = f"round {number + 1} of {arguments.rounds}: {load.name}, {name}"
            if name == DIRECT and engine is not None:
                engines.append(engine_turn(engine, load.side, MAX_ROWS, arguments.seconds))
                say(f"{message}: rows/s by batch {engines[-1]['per_s']}")
                continue
            try:
                turns[load.name, name].append(
                    taken := turn(starters[name], load, arguments.seconds, folder)
                )
                say(f"{message}: {taken.per_s:,.0f} requests/s {'; '.join(taken.faults)}")
            except (NotStarted, subprocess.CalledProcessError) as error:
                why[name] = f"{load.name}: {error}"
                say(f"{message}: {error}")
    return turns, engines


def rows_from(
    turns: Turns, why: dict[str, str], engines: Sequence[dict[str, Any]], names: Sequence[str]
) -> list[Row]:
    """All rows: those of the wire held against FastAPI, those of the CNN against the engine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]  # it need not be installed
    versions = {peer.name: peer.version for peer in PEERS} | {CRUCIBLE: project["version"]}
    bases = {WIRE: turns_base(turns.get((WIRE, FASTAPI), [])), CNN: engine_base(engines)}
    rows: list[Row] = []
    for load in (WIRE, CNN):
        rows += [engine_row(load, engines)] if load == CNN and engines else []
        for name in (name for name in NAMES if name in names):
            taken = turns.get((load, name))
            if taken is None or name in why:
                rows.append(
                    missing_row(load, name, versions[name], why.get(name, "it had no turn"))
                )
            else:
                rows.append(row_of(load, name, versions[name], taken, bases[load]))
    return rows


def placed(rows: Sequence[Row], loads: Sequence[Load], ran: str | None) -> list[Row]:
    """The rows of these loads; those of Crucible and of its engine say where the CNN ran."""
    asked = {load.name for load in loads}
    ours = {(CNN, CRUCIBLE), (CNN, DIRECT)}
    return [
        row | {"ran_on": ran if (row["load"], row["server"]) in ours else None}
        for row in rows
        if row["load"] in asked
    ]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
