"""A server without HTTP: `python -m tests.service.builders.server_double HOME NAME...`.

Runs what is queued, and a job of each name; ends when all have.
Prints a line per accepted job. On uvloop, as `crucible serve`.
"""

import asyncio
import sys
from pathlib import Path

import uvloop

from service.devices.leases import Leases
from service.devices.policy import Devices
from service.jobs.queue import JobRunner
from service.jobs.store import JobStore
from service.settings import Settings
from service.storage.database import Database
from tests.service.builders.jobs import WORKER, new_job


async def main(home: Path, names: list[str]) -> None:
    store = JobStore(Database(home / "crucible.db"))
    runner = JobRunner(
        Settings(home=home),
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
