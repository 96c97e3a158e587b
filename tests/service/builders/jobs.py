"""A runner with a double for its worker, jobs named by what the double is to do, and a report that
it can deliver.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from pipeline.core.artifacts import Engine
from pipeline.execution.store import Key, Store
from pipeline.plan.schema import ModelConfig, Plan
from pipeline.report.bundle import deliver_engine
from pipeline.report.files import HTML_NAME, JSON_NAME, MARKDOWN_NAME
from pipeline.results.report import Report
from service.devices.leases import Clock, Leases, utc_now
from service.devices.policy import Devices
from service.jobs.queue import JobRunner
from service.jobs.state import Job, new_id
from service.jobs.store import JobStore
from service.sandbox.process_tree import of_jobs
from service.settings import Settings
from service.storage.database import database_from
from service.storage.layout import Folders
from tests.builders.report import sample_report

WORKER = (sys.executable, str(Path(__file__).with_name("worker_double.py")))
WITHIN_S = 60.0  # for what takes a second on a quiet machine


def write_out(out: Path, store: Path, real: Engine | None = None) -> Report:
    """A report with its winner's engine in `out`, as a child leaves it; the engine comes from a
    store, and runs if a real one is given.
    """
    report = sample_report()
    winner = next(candidate for candidate in report.candidates if candidate.label == report.winner)
    assert winner.engine is not None
    model = real or winner.engine

    def make(folder: Path) -> Engine:
        if real is not None:
            shutil.copytree(real.root, folder, dirs_exist_ok=True)
        else:
            (folder / model.file).write_bytes(b"engine")
        return model.model_copy(update={"root": folder})

    engine = Store(store).get(Key("build", 1, (model.digest,)), Engine, make).value
    winners = tuple(
        candidate.model_copy(update={"engine": engine}) if candidate is winner else candidate
        for candidate in report.candidates
    )
    report = report.model_copy(update={"candidates": winners})
    out.mkdir(parents=True)
    deliver_engine(engine, out / "engine")
    for name in (MARKDOWN_NAME, HTML_NAME):
        (out / name).write_text("a report")
    (out / JSON_NAME).write_text(report.model_dump_json())
    return report


def new_job(folders: Folders, name: str, device: str = "cpu", identity: str = "") -> Job:
    """A job with its upload, as the router makes it."""
    now = utc_now()
    job_id = new_id(now)
    folders.save_plan(
        job_id, Plan(name=name, model=ModelConfig(path=folders.uploads(job_id) / "model.onnx"))
    )
    return Job(
        id=job_id,
        owner="me",
        identity=identity or job_id,
        name=name,
        device=device,
        created=now.isoformat(timespec="milliseconds"),
    )


class Bench:
    """A running JobRunner and what it works on."""

    def __init__(self, home: Path, runner: JobRunner, store: JobStore) -> None:
        self.home, self.runner, self.store, self.folders = home, runner, store, Folders(home)

    async def submit(self, name: str, device: str = "cpu", identity: str = "") -> Job:
        job, _ = await self.runner.submit(new_job(self.folders, name, device, identity))
        return job

    async def until(
        self, job: Job, reached: Callable[[Job], bool] = lambda job: job.is_final
    ) -> Job:
        """Wait, as a client does, until the job is as it should be."""
        end = time.monotonic() + WITHIN_S
        while True:
            changed = self.runner.changed(job.id)
            current = self.store.get(job.id)
            if reached(current):
                return current
            assert time.monotonic() < end, f"{current} is not as it should be"
            try:
                await asyncio.wait_for(changed.wait(), 1)
            except TimeoutError:
                continue

    async def end_of(self, name: str) -> Job:
        return await self.until(await self.submit(name))

    def kinds(self, job: Job) -> list[str]:
        return [event.kind for event in self.store.events(job.id)]


@asynccontextmanager
async def running(
    home: Path,
    *,
    devices: tuple[str, ...] = ("cpu",),
    worker: tuple[str, ...] = WORKER,
    store_kind: type[JobStore] = JobStore,
    clock: Clock = utc_now,
    options: Settings | None = None,
    **settings: object,
) -> AsyncIterator[Bench]:
    """A started runner, stopped at the end; nothing that carries its jobs' marks may be left
    then.
    """
    if not (home / "template").exists():
        write_out(home / "template", home / "template-store")
    options = options or Settings(home=home, **settings)  # type: ignore[arg-type]
    database = database_from(options)
    store = store_kind(database)
    runner = JobRunner(options, store, Leases(Devices(devices), clock), worker)
    await runner.start()
    try:
        yield Bench(home, runner, store)
    finally:
        await runner.stop()
        everyone = [job.id for job in store.list(limit=1000).jobs]
        database.close()
        assert of_jobs(everyone) == []
