"""A server without HTTP: `python -m tests.service.builders.server_double HOME NAME...`.

Runs what is queued, and a job of each name; ends when all have.
Prints a line per accepted job. On uvloop, as `crucible serve`.
"""

import asyncio
import os
import sys
from pathlib import Path

import uvloop

from service.devices.leases import Leases
from service.devices.policy import Devices
from service.jobs.queue import JobRunner
from service.jobs.store import JobStore
from service.settings import settings_from
from service.storage.database import database_from
from tests.service.builders.jobs import WORKER, new_job


async def main(home: Path, names: list[str]) -> None:
    settings = settings_from(os.environ, home=home)
    store = JobStore(database_from(settings))
    runner = JobRunner(
        settings,
        store,
        Leases(Devices(("cpu", "gpu:0"))),
        WORKER,
        most_interruptions=1000,
    )
    await runner.start()
    for number, name in enumerate(names):
        job, _ = await runner.submit(new_job(runner.folders, name, ("cpu", "gpu:0")[number % 2]))
        print("accepted", job.id, flush=True)
    while store.unfinished():
        await asyncio.sleep(0.1)
    await runner.stop()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), sys.argv[2:]))
