"""`crucible node start`: run the jobs of a database, without HTTP.

SIGTERM or Ctrl-C:  running jobs are stopped and queued again, and other nodes take them
another node in the record of this one:  the same
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.errors import UserError
from pipeline.host.labels import Labels
from service import logs
from service.cluster.record import NodeRecord, read_record, write_record
from service.context import Probe, probe
from service.devices.leases import Leases
from service.devices.policy import Devices
from service.jobs.builds import builds_from
from service.jobs.messages import HostIdentity
from service.jobs.queue import WORKER, JobRunner
from service.jobs.store import JobStore
from service.sandbox.layers import Sandbox
from service.settings import Settings
from service.storage.database import POSTGRESQL_MARK, database_from
from service.storage.files import files_from
from service.storage.layout import secure_home

POLL_S = 1.0  # between two looks at the record

log = logs.get("service.node")


def run_node(
    settings: Settings,
    devices: Sequence[str] = (),
    labels: Labels | None = None,
    worker: Sequence[str] = WORKER,
    probe: Probe = probe,
    record: Path | None = None,
) -> None:
    """Run jobs until SIGTERM or Ctrl-C, on these devices of the host (none: on all), which have
    `labels` besides those that are found. It is written to the file `record`, and ends once another
    node is. UserError without a shared database, or for a device that the host lacks.
    """
    if settings.database_url is None:
        raise UserError(
            "a node needs the PostgreSQL database of the servers, and none is set",
            "set CRUCIBLE_SERVICE_DATABASE_URL; and CRUCIBLE_SERVICE_FILES_URL, or their home",
        )
    logs.configure(settings)
    asyncio.run(_run(settings, devices, labels or {}, worker, probe, record))


def labels_of_devices(
    host: HostIdentity, devices: Sequence[str], labels: Labels
) -> dict[str, Mapping[str, str]]:
    """Return the labels of the chosen devices of a host. UserError for one that it lacks."""
    if absent := [device for device in devices if device not in host.devices]:
        raise UserError(
            f"this host has no device '{absent[0]}'; it has {', '.join(host.devices)}",
            "give some of these to --devices",
        )
    chosen = devices or tuple(host.devices)
    return {device: {**host.labels.get(device, {}), **labels} for device in chosen}


async def _run(
    settings: Settings,
    devices: Sequence[str],
    labels: Labels,
    worker: Sequence[str],
    probe: Probe,
    record: Path | None,
) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    with contextlib.suppress(PermissionError):  # a volume that belongs to another user
        secure_home(settings.home)
    host = await probe()
    known = labels_of_devices(host, devices, labels)
    database = await asyncio.to_thread(database_from, settings)
    builds = builds_from(settings, database)
    try:
        (settings.home / POSTGRESQL_MARK).touch()
        sandbox = Sandbox(settings.home)
        if settings.sandbox == "auto":
            await asyncio.to_thread(sandbox.find)
        leases = Leases(Devices(tuple(known)))
        runner = JobRunner(
            settings,
            JobStore(database),
            leases,
            worker,
            sandbox,
            files=files_from(settings, database),
            builds=builds,
            kind="node",
        )
        if record is not None:
            write_record(record, NodeRecord.of_this_process(runner.all_nodes.id))
        await runner.start(known, host.possible_candidates)
        print(f"node {runner.all_nodes.id} runs jobs on {', '.join(known)}", flush=True)
        await _until(stopped, record, runner.all_nodes.id)
        log.info("node.stopping", node=runner.all_nodes.id)
        await runner.stop(settings.shutdown_s)
    finally:
        if builds is not None:
            builds.close()
        await asyncio.to_thread(database.close)


async def _until(stopped: asyncio.Event, record: Path | None, node: str) -> None:
    """Wait for the signal to stop, or for another node in the record."""
    while not stopped.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), POLL_S if record else None)
        current = await asyncio.to_thread(read_record, record) if record else None
        if current is not None and current.node != node:
            log.warning("node.replaced", node=node, by=current.node)
            return
