"""One deployment on one GPU of a host and on two of them, asked in turns.

    python -m benchmarks two_gpus [--parts compute,copies] [--seconds S] [--rounds N]
                                  [--connections N,N] [--images N] [--instances N]
                                  [--client-cores N] [--http-processes N]
                                  [--home DIR] [--into DIR] [--limit SECONDS]

compute  ResNet-50 in fp32 that enlarges each image from 128 to 896 pixels (131 GFLOP), one image in
         a request: the GPUs bind
copies   ResNet-50 in int8 with `preprocess`, 64 uint8 images (9.6 MB) in a request, as in
         `serving_ceiling`: the way through the host may bind

One server has the same engine three times: on the `first` GPU, on the `second`, and on `both`. In
each round each is asked for `--seconds` on each number of connections, and every other round runs
in reverse. Figures are medians of the rounds. `of_ideal` is the rate on both over the sum of the
rates on each, in the same round. `second_share` is the share of batches that the second GPU ran.

Minutes of each part: 1.5, and with an empty `--home` a compile (1 to 3). All end after --limit
seconds (540): what is not done then has no result.
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
from benchmarks.limits.part_results import measure_parts
from benchmarks.limits.serving_ceiling import WARM_UP_S, Asked, Setting, closed, on_cores
from benchmarks.serving.client import ask_once, http_request
from benchmarks.serving.crucible import Served, plan_of, serving
from benchmarks.serving.models import image, oip_body, write_cnn
from benchmarks.serving.setups import SETUPS
from service.client import Client
from service.devices.gpus import GpuKind, gpu_kinds
from service.registry.models import DeploymentOptions

NAME = "two_gpus"
FIRST, SECOND, BOTH = "first", "second", "both"
GOAL = 0.9  # of the two GPUs one by one
MOST_ROWS = 16  # of the profile of `compute`
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
    places = places_on(gpu_kinds())
    with tempfile.TemporaryDirectory(prefix="crucible-gpus-") as text:
        setting = serving_ceiling.setting_from(arguments, Path(text))
        parts = {
            name: partial(measured, name, LOADS[name](setting), setting, arguments.rounds, places)
            for name in arguments.parts
        }
        run: dict[str, str | float | int] = {
            "devices": ", ".join(places[BOTH]),
            "rounds": arguments.rounds,
            "seconds": setting.seconds,
            "server_cores": len(setting.server),
            "client_cores": len(setting.clients),
            "http_processes": setting.http_processes,
        }
        measure_parts(NAME, parts, targets_of, arguments.into, arguments.limit, run)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser(NAME, __doc__)
    parser.add_argument("--parts", type=_parts, default=tuple(LOADS), metavar="PART,PART")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a stretch [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="[%(default)s]")
    serving_ceiling.add_server_arguments(parser, connections=(16, 32))
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--limit", type=float, default=540.0, metavar="SECONDS", help="[540]")
    parser.set_defaults(backend="tensorrt")
    return parser.parse_args(words)


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := [part for part in parts if part not in LOADS]:
        raise argparse.ArgumentTypeError(f"no part '{unknown[0]}'; expected {', '.join(LOADS)}")
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


def compute_load(setting: Setting) -> Load:
    setup = SETUPS[setting.backend]
    return Load(
        plan_of("compute", MOST_ROWS, setup.backend),
        partial(write_cnn, name=setup.cnn, side=setup.side, enlarged=setup.enlarged),
        image(setup.side),
        setup.options,
    )


def copies_load(setting: Setting) -> Load:
    return Load(
        serving_ceiling.engine_plan(setting),
        partial(write_cnn, name="resnet50", side=serving_ceiling.SIDE),
        serving_ceiling.images_of(setting.images),
        DeploymentOptions(instances=setting.instances, max_batch=setting.images, max_delay_s=0.0),
    )


LOADS: Mapping[str, Callable[[Setting], Load]] = {"compute": compute_load, "copies": copies_load}


# -- what comes --------------------------------------------------------------


def measured(name: str, load: Load, setting: Setting, rounds: int, places: Places) -> list[Row]:
    """The rows of a part: each deployment, on each number of connections."""
    home, setting = setting.home(name), replace(setting, images=len(load.array))
    model = setting.folder / f"{name}.onnx"
    if not serving_ceiling.delivered(home):
        load.write(model)
    job = serving_ceiling.compiled(home, model, load.plan)
    taken: defaultdict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    with (
        on_cores(setting.server),
        serving(home, setting.http_processes) as served,
        Client(served.url) as client,
    ):
        asked = {
            place: deployed(client, served, place, job, load, devices)
            for place, devices in places.items()
        }
        for each in asked.values():
            closed(each, max(setting.connections), WARM_UP_S, setting)
        for number in range(rounds):
            for place in reversed(list(places)) if number % 2 else list(places):
                for count in setting.connections:
                    before = batches_by_device(served.url, place)
                    row = closed(asked[place], count, setting.seconds, setting)
                    share = share_of(
                        places[place][-1], before, batches_by_device(served.url, place)
                    )
                    taken[count, place].append({**row, "second_share": share})
    return [
        row
        for count in setting.connections
        for row in rows_of({place: taken[count, place] for place in places}, count, places)
    ]


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


def share_of(device: str, before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """The share of the batches in between that a device ran."""
    ran = {name: after[name] - before.get(name, 0.0) for name in after}
    return ran[device] / max(1.0, sum(ran.values()))


def rows_of(
    rounds: Mapping[str, Sequence[Mapping[str, Any]]], connections: int, places: Places
) -> list[Row]:
    """A row for each deployment from its rounds."""
    rates = {
        place: [float(row["images_per_s"]) for row in taken] for place, taken in rounds.items()
    }
    singles = zip(rates[FIRST], rates[SECOND], rates[BOTH], strict=True)
    ratios = [both / (first + second) for first, second, both in singles]
    rows: list[Row] = []
    for place, taken in rounds.items():
        row: dict[str, Any] = {
            "deployment": place,
            "devices": ", ".join(places[place]),
            "connections": connections,
            "images_per_s": median(rates[place]),
            "lowest": min(rates[place]),
            "highest": max(rates[place]),
            **{name: median_of(taken, name) for name in MEDIANS},
        }
        if place == BOTH:
            row |= {
                "of_ideal": median(ratios),
                "of_ideal_low": min(ratios),
                "of_ideal_high": max(ratios),
                "second_share": median_of(taken, "second_share"),
            }
        rows.append({**row, "note": next((each["note"] for each in taken if each["note"]), None)})
    return rows


MEDIANS = ("p50_ms", "p99_ms", "compute_ms", "queue_ms", "api_cores", "rest_cores", "client_cores")


def median_of(taken: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The median of the rounds that have this figure: a short round has no p99."""
    values = [row[name] for row in taken if row[name] is not None]
    return median(values) if values else None


def targets_of(rows: Sequence[Row]) -> dict[str, bool]:
    """Two GPUs do most of what they do one by one, where they bind."""
    got = max(
        (float(row.get("of_ideal") or 0) for row in rows if row["part"] == "compute"), default=0
    )
    if not got:
        return {}
    return {f"`compute` on both: at least {GOAL:.0%} of one by one (got {got:.0%})": got >= GOAL}
