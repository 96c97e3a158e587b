"""One of two processes that race: `python -m benchmarks.faults.cluster.racer HOME`.

It reads an order per line, waits for the moment that the order names, carries it out, and prints
the outcome. A moment is one of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Literal

from pipeline.core.artifacts import Artifact
from pipeline.core.frozen import Frozen
from pipeline.execution.store import Key, Store
from service.devices.leases import utc_now
from service.jobs.builds import builds_from
from service.jobs.claims import LEASE_S, Claim, Claims
from service.jobs.state import Job, StaleEvent, Started, Succeeded, after_a_crash
from service.jobs.store import JobStore, Once
from service.registry.models import Version
from service.registry.repository import Repository
from service.settings import Settings, settings_from
from service.storage.database import database_from
from service.storage.files import files_from
from service.storage.layout import Folders

WAIT_S = 0.02  # between two looks for what the other process holds
STAGE = "build"
MOST_INTERRUPTIONS = 5

Kind = Literal["submit", "claim", "claim of few", "take over", "publish", "build", "promote"]


class Order(Frozen):
    """What to do, and when."""

    kind: Kind
    at_s: float
    job: Job  # which is raced for; its name is that of the race
    token: int = 0  # of the claim that this process holds
    version: Version | None = None
    engine: Path | None = None


class Outcome(Frozen):
    """What came of it. `detail`: the id of a submitted job, the maker of a build, the number of a
    version.
    """

    won: bool
    detail: str = ""


class Made(Artifact):
    """A file with the name of the process that has made it."""


class Racer:
    """A process that does what servers do, without their loops."""

    def __init__(self, settings: Settings) -> None:
        database = database_from(settings)
        self.home, self.name = settings.home, settings.home.name
        self._jobs, self._claims = JobStore(database), Claims(database, self.name)
        self._files, self._builds = files_from(settings, database), builds_from(settings, database)
        self._models = Repository(database, Folders(self.home), self._files)

    def carry_out(self, order: Order) -> Outcome:
        match order.kind:
            case "submit":
                return self._submit(order.job)
            case "claim":
                return self._claim(order.job, None)
            case "claim of few":
                return self._claim(order.job, 1)
            case "take over":
                return Outcome(won=self._take_over() is not None)
            case "publish":
                return self._publish(order.job, order.token)
            case "build":
                return self._build(order.job)
            case "promote":
                return self._promote(order)

    def _submit(self, job: Job) -> Outcome:
        added, is_new = self._jobs.add(job, utc_now(), Once(job.name, "digest"))
        return Outcome(won=is_new, detail=added.id)

    def _claim(self, job: Job, most_running: int | None) -> Outcome:
        claim = self._claims.claim([job.queue], most_running)
        if claim is None:
            return Outcome(won=False)
        self._start(claim)
        return Outcome(won=True)

    def _start(self, claim: Claim) -> None:
        self._jobs.append(claim.job.id, Started(1, 1.0), utc_now(), token=claim.token)

    def _take_over(self) -> Claim | None:
        """Queue the job of a dead server again."""
        claim = next(iter(self._claims.expired(LEASE_S)), None)
        if claim is not None:
            event = after_a_crash(claim.job, MOST_INTERRUPTIONS)
            self._jobs.append(claim.job.id, event, utc_now(), token=claim.token)
        return claim

    def _publish(self, job: Job, token: int) -> Outcome:
        """The holder of the claim publishes. The other one takes the job over, and publishes."""
        if not token:
            if self._take_over() is None:
                return Outcome(won=False)
            # the other process may lock the row now: then it is left out
            while (claim := self._claims.claim([job.queue], None)) is None:
                time.sleep(WAIT_S)
            self._start(claim)
            token = claim.token
        folder = Folders(self.home).report(job.id)
        folder.mkdir(parents=True)
        (folder / "report.md").write_text(self.name, encoding="utf-8")
        stored = self._files.upload(folder, token)
        ending = Succeeded("accepted", None)
        try:
            self._jobs.append(job.id, ending, utc_now(), token=token, files=stored)
        except StaleEvent:
            return Outcome(won=False)
        return Outcome(won=True)

    def _build(self, job: Job) -> Outcome:
        assert self._builds is not None
        key = Key(STAGE, 1, (job.name,))
        while (answer := self._builds.seek(self.name, STAGE, key.digest, True)) == "wait":
            time.sleep(WAIT_S)
        if answer == "make":
            work = self.home / "work" / job.id
            Store(work).get(key, Made, self._make)
            self._builds.made(self.name, work, STAGE, key.digest)
        found = Store(self.home).find(key, Made)
        maker = found.value.path.read_text(encoding="utf-8") if found else "nobody"
        return Outcome(won=answer == "make", detail=maker)

    def _make(self, folder: Path) -> Made:
        (folder / "maker").write_text(self.name, encoding="utf-8")
        return Made(root=folder, file="maker")

    def _promote(self, order: Order) -> Outcome:
        assert order.version is not None
        assert order.engine is not None
        added = self._models.add(order.version, order.engine, current=True, newest=0)
        return Outcome(won=True, detail=str(added.version))


def main(home: Path) -> None:
    racer = Racer(settings_from(os.environ, home=home))
    print("ready", flush=True)
    for line in sys.stdin:
        order = Order.model_validate_json(line)
        time.sleep(max(0.0, order.at_s - time.monotonic()))
        print(racer.carry_out(order).model_dump_json(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
