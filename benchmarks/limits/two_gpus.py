"""One deployment on one GPU of a host and on two of them, asked in turns.

    python -m benchmarks two_gpus [--parts bert,copies,beside] [--seconds S] [--rounds N]
                                  [--connections N,N] [--images N] [--instances N]
                                  [--client-cores N] [--http-processes N]
                                  [--home DIR] [--compile] [--into DIR] [--limit SECONDS]

bert    BERT-base in fp16, 32 texts of 128 tokens in a request, one row of 768 numbers for each in
        the answer: the GPUs bind
copies  ResNet-50 in int8 with `preprocess`, 64 uint8 images (9.6 MB) in a request, as in
        `serving_ceiling`: the way through the host may bind
beside  the engine of `copies` on the first GPU alone, and while the second one builds engines

One server has the same engine three times: on the `first` GPU, on the `second`, and on `both`. In
each round each is asked for `--seconds` on each number of connections, and every other round runs
in reverse. Figures are medians of the rounds. `of_one` is the rate on both over the mean of the
rates on each, in the same round. `second_share` is the share of batches that the second GPU ran.
Rows `in process` ask the deployment from Python in the server's own process: the worker and its
shared memory, without a wire. Rows `open` come at random times, at 80 % of the highest rate of
that deployment on the wire.

Minutes: bert and copies 3 each, and with an empty `--home` a compile (1 to 3); beside 2. All end
after --limit seconds (540): what is not done then has no result. `--compile` measures nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from benchmarks.common import RESULTS, Row, argument_parser
from benchmarks.gpu.host import tensorrt_device
from benchmarks.limits import serving_ceiling
from benchmarks.limits.beside_build import compile_command, rows_beside
from benchmarks.limits.in_process import asked_in_process
from benchmarks.limits.part_results import measure_parts
from benchmarks.limits.serving_ceiling import WARM_UP_S, Asked, Setting, closed, on_cores, opened
from benchmarks.serving.client import ask_once, http_request
from benchmarks.serving.crucible import Served, serving
from benchmarks.serving.models import TOKENS, oip_body, write_cnn, write_text_encoder
from service.client import Client
from service.devices.gpus import GpuKind, gpu_kinds
from service.registry.models import DeploymentOptions

NAME = "two_gpus"
FIRST, SECOND, BOTH = "first", "second", "both"
BESIDE_BUILD = "beside"
GOAL = 1.9  # times one GPU
NEAR = 0.05  # of the share that each GPU should have
UNDISTURBED = 0.02  # of the time of an engine alone
OPEN_SHARE = 0.8
TEXTS = 32
BERT_LAYERS = 12
WIRE, IN_PROCESS, OPEN = "wire", "in process", "open"
Places = Mapping[str, tuple[str, ...]]
"""The devices of each of the three deployments."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is compiled, and what is asked."""

    plan: Mapping[str, Any]
    write: Callable[[Path], Path]  # the model
    array: NDArray[Any]  # of one request
    options: DeploymentOptions


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    tensorrt_device()
    places = places_on(gpu_kinds()) if not arguments.compile else {}
    with tempfile.TemporaryDirectory(prefix="crucible-gpus-") as text:
        setting = serving_ceiling.setting_from(arguments, Path(text))
        loads = {name: LOADS[name](setting) for name in LOADS if name in arguments.parts}
        if arguments.compile:
            for name, load in loads.items():
                job_of(name, load, setting)
            return
        parts: dict[str, Callable[[], Sequence[Row]]] = {
            name: partial(measured, name, load, setting, arguments.rounds, places)
            for name, load in loads.items()
        }
        if BESIDE_BUILD in arguments.parts:
            parts[BESIDE_BUILD] = partial(beside, setting, places)
        run: dict[str, str | float | int] = {
            "devices": ", ".join(places[BOTH]),
            "seconds": setting.seconds,
            "server_cores": len(setting.server),
            "client_cores": len(setting.clients),
            "http_processes": setting.http_processes,
        }
        measure_parts(NAME, parts, targets_of, arguments.into, arguments.limit, run)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser(NAME, __doc__)
    parser.add_argument("--parts", type=_parts, default=PARTS, metavar="PART,PART")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a stretch [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="[%(default)s]")
    serving_ceiling.add_server_arguments(parser, connections=(16, 32))
    parser.add_argument("--compile", action="store_true", help="measure nothing")
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--limit", type=float, default=540.0, metavar="SECONDS", help="[540]")
    parser.set_defaults(backend="tensorrt")
    return parser.parse_args(words)


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := [part for part in parts if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part '{unknown[0]}'; expected {', '.join(PARTS)}")
    return parts


def places_on(kinds: Mapping[str, GpuKind]) -> Places:
    """The first two GPUs of one kind; exits where there are none."""
    devices: defaultdict[GpuKind, list[str]] = defaultdict(list)
    for device, kind in kinds.items():
        devices[kind].append(device)
        if len(devices[kind]) == 2:
            first, second = devices[kind]
            return {FIRST: (first,), SECOND: (second,), BOTH: (first, second)}
    here = "; ".join(f"{device} is {kind}" for device, kind in kinds.items()) or "there is none"
    sys.exit(
        f"expected two GPUs of one kind; {here}\n  next: run it on a host with two, and let"
        " CUDA_VISIBLE_DEVICES name both"
    )


# -- what is asked -----------------------------------------------------------


def bert_load(setting: Setting) -> Load:
    layers = BERT_LAYERS if setting.backend == "tensorrt" else 1
    precision = "fp16" if setting.backend == "tensorrt" else "fp32"
    plan = serving_ceiling.plan_of("bert", TEXTS)
    if setting.backend == "tensorrt":
        plan["tensorrt"] = {"optimization_level": 2}  # builds sooner; all ask the same engine
    return Load(
        {**plan, "candidates": [{"backend": setting.backend, "precision": precision}]},
        partial(write_text_encoder, layers=layers),
        np.random.default_rng(0).integers(1000, 30_000, (TEXTS, TOKENS)),
        DeploymentOptions(instances=setting.instances, max_batch=TEXTS, max_delay_s=0.0),
    )


def copies_load(setting: Setting) -> Load:
    return Load(
        serving_ceiling.engine_plan(setting),
        partial(write_cnn, name="resnet50", side=serving_ceiling.SIDE),
        serving_ceiling.images_of(setting.images),
        DeploymentOptions(instances=setting.instances, max_batch=setting.images, max_delay_s=0.0),
    )


LOADS: Mapping[str, Callable[[Setting], Load]] = {"bert": bert_load, "copies": copies_load}
PARTS = (*LOADS, BESIDE_BUILD)


# -- what comes --------------------------------------------------------------


def measured(name: str, load: Load, setting: Setting, rounds: int, places: Places) -> list[Row]:
    """The rows of a part: each deployment, on each number of connections, without a wire, and at
    random times.
    """
    setting = replace(setting, images=len(load.array))
    home = setting.home(name)
    job = job_of(name, load, setting)
    taken: defaultdict[tuple[str, int], dict[str, list[dict[str, Any]]]]
    taken = defaultdict(lambda: {place: [] for place in places})
    with on_cores(setting.server):
        with (
            serving(home, setting.http_processes) as served,
            Client(served.url) as client,
        ):
            asked = {
                place: deployed(client, served, place, job, load, devices)
                for place, devices in places.items()
            }
            for each in asked.values():
                closed(each, max(setting.connections), WARM_UP_S, setting)
            for place in turns(places, rounds):
                for count in setting.connections:
                    before = batches_by_device(served.url, place)
                    row = closed(asked[place], count, setting.seconds, setting)
                    ran = batches_since(before, batches_by_device(served.url, place))
                    share = share_of(places[place][-1], ran)
                    body = {
                        "GB_per_s": float(row["requests_per_s"] or 0)
                        * len(asked[place].request)
                        / 1e9
                    }
                    taken[WIRE, count][place].append({**row, **body, "second_share": share})
            highest = {
                place: max(
                    median(float(row["requests_per_s"]) for row in rows[place])
                    for rows in taken.values()
                )
                for place in places
            }
            for place in turns(places, rounds):
                rate = OPEN_SHARE * highest[place]
                row = opened(asked[place], rate, setting)
                taken[OPEN, 0][place].append(dict(row))
        names = turns(places, rounds)
        clients = max(setting.connections)
        found = asked_in_process(home, names, load.array, clients, setting.seconds)
        for place, row in zip(names, found, strict=True):
            share = share_of(places[place][-1], row.pop("batches"))
            taken[IN_PROCESS, clients][place].append({**row, "note": None, "second_share": share})
    return [
        row for (way, count), rows in taken.items() for row in rows_of(rows, way, count, places)
    ]


def job_of(name: str, load: Load, setting: Setting) -> str:
    """The job that compiled a part's model; it is compiled unless the home holds it."""
    home = replace(setting, images=len(load.array)).home(name)
    model = setting.folder / f"{name}.onnx"
    if not serving_ceiling.delivered(home):
        load.write(model)
    return serving_ceiling.compiled(home, model, load.plan)


def turns(places: Places, rounds: int) -> list[str]:
    """The deployments in the order in which they are asked: every other round in reverse."""
    names = list(places)
    return [name for number in range(rounds) for name in (names[::-1] if number % 2 else names)]


def beside(setting: Setting, places: Places) -> list[Row]:
    """The engine of `copies` on the first GPU, alone and beside a compile on the second."""
    load = copies_load(setting)
    job_of("copies", load, setting)
    engine = Path(
        serving_ceiling.delivered(replace(setting, images=len(load.array)).home("copies"))
    )
    model = write_cnn(setting.folder / "beside.onnx", "resnet50", serving_ceiling.SIDE)
    command = compile_command(model, setting.folder)
    log = setting.folder / "beside.log"
    return rows_beside(engine, load.array, setting.seconds / 4, command, log, *places[SECOND])


def deployed(
    client: Client, served: Served, name: str, job: str, load: Load, devices: tuple[str, ...]
) -> Asked:
    """The engine of a job, loaded on these devices under a name of its own."""
    client.promote(name, job, override=True)  # without data nothing is proved
    client.load(name, load.options.model_copy(update={"device": devices}))
    body, headers = oip_body(load.array)
    request = http_request(served.port, f"/v2/models/{name}/infer", body, headers)
    status, _, answer = ask_once(served.port, request)
    if status != 200:
        raise RuntimeError(f"status {status}: {answer[:300].decode(errors='replace')}")
    columns = client.model(name).current.outputs[0].shape[-1]
    size = len(load.array) * int(columns) * np.dtype(np.float32).itemsize
    return Asked(served.process, served.port, request, answer[-size:])


def batches_by_device(url: str, model: str) -> dict[str, float]:
    """The number of batches that each device has run."""
    text = httpx.get(f"{url}/metrics").text
    pattern = rf'crucible_inference_batch_rows_count{{device="([^"]+)",model="{model}".*}} (\S+)'
    return {device: float(count) for device, count in re.findall(pattern, text)}


def batches_since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - before.get(name, 0.0) for name in after}


def share_of(device: str, ran: Mapping[str, float]) -> float:
    """The share of the batches that a device ran."""
    return ran.get(device, 0.0) / max(1.0, sum(ran.values()))


def rows_of(
    rounds: Mapping[str, Sequence[Mapping[str, Any]]], way: str, connections: int, places: Places
) -> list[Row]:
    """A row for each deployment from its rounds."""
    rates = {
        place: [float(row["images_per_s"]) for row in taken] for place, taken in rounds.items()
    }
    singles = zip(rates[FIRST], rates[SECOND], rates[BOTH], strict=True)
    ratios = [2 * both / (first + second) for first, second, both in singles]
    rows: list[Row] = []
    for place, taken in rounds.items():
        row: dict[str, Any] = {
            "way": way,
            "deployment": place,
            "devices": ", ".join(places[place]),
            "connections": connections or None,
            "rounds": len(taken),
            "rows_per_s": median(rates[place]),
            "lowest": min(rates[place]),
            "highest": max(rates[place]),
            **{name: median_of(taken, name) for name in MEDIANS},
        }
        if place == BOTH and way != OPEN:
            row |= {
                "of_one": median(ratios),
                "of_one_low": min(ratios),
                "of_one_high": max(ratios),
                "second_share": median_of(taken, "second_share"),
            }
        rows.append({**row, "note": next((each["note"] for each in taken if each["note"]), None)})
    return rows


MEDIANS = (
    "p50_ms",
    "p99_ms",
    "GB_per_s",
    "compute_ms",
    "queue_ms",
    "api_cores",
    "rest_cores",
    "client_cores",
)


def median_of(taken: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The median of the rounds that have this figure: a short round has no p99."""
    values = [row[name] for row in taken if row.get(name) is not None]
    return median(values) if values else None


def targets_of(rows: Sequence[Row]) -> dict[str, bool]:
    """Two GPUs do nearly twice what one does, both are busy, nobody waits longer than on one, and a
    compile on the other GPU disturbs no engine.
    """
    targets: dict[str, bool] = {}
    for part in LOADS:
        found = [row for row in rows if row["part"] == part]
        for way in (WIRE, IN_PROCESS):
            both = [row for row in found if row.get("way") == way and row.get("of_one")]
            if not both:
                continue
            best = max(both, key=lambda row: float(row["of_one"] or 0))
            times, share = float(best["of_one"] or 0), float(best["second_share"] or 0)
            text = f"`{part}`, {way}: at least {GOAL:g} times one GPU (got {times:.2f})"
            targets[text] = times >= GOAL
            text = f"`{part}`, {way}: half of the batches on each GPU within {NEAR:.0%}"
            targets[f"{text} (got {share:.1%})"] = abs(share - 0.5) <= NEAR / 2
        tails = {
            row["deployment"]: float(row["p99_ms"] or 0)
            for row in found
            if row.get("way") == OPEN and row.get("p99_ms")
        }
        if len(tails) == len((FIRST, SECOND, BOTH)):
            one = max(tails[FIRST], tails[SECOND])
            text = f"`{part}` at {OPEN_SHARE:.0%} of its own rate: p99 no worse than one GPU's"
            targets[f"{text} (got {tails[BOTH]:.1f} ms, one {one:.1f})"] = tails[BOTH] <= one
    for row in rows:
        if row["part"] == BESIDE_BUILD and row.get("way") == "beside":
            more = float(row["of_alone"] or 0) - 1
            text = f"an engine beside a compile on the other GPU: within {UNDISTURBED:.0%} of alone"
            targets[f"{text} (got {more:+.1%})"] = abs(more) <= UNDISTURBED
    return targets
