"""What goes with time, and what stays however old it is."""

import asyncio
import datetime as dt
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.artifacts import Artifact
from pipeline.execution.store import Key, Store
from service.jobs.retention import Collected, Contents, Expired, Item, collect, expired
from service.jobs.state import CancelAsked, Job
from service.jobs.store import JobStore
from service.registry.repository import Repository
from service.settings import Settings
from service.storage.audit import Audit
from service.storage.audit_entry import SERVICE, Entry
from service.storage.database import Database
from service.storage.layout import Folders
from tests.service.builders.app import Desk, at_desk
from tests.service.builders.jobs import new_job
from tests.service.serving.models import shelf

NOW = dt.datetime(2026, 6, 1, tzinfo=dt.UTC)
SETTINGS = Settings(home=Path("/h"), retention_days=10, job_timeout_s=3600)
NOTHING = Contents((), frozenset(), (), (), ())


def ago(**age: float) -> dt.datetime:
    return NOW - dt.timedelta(**age)


def ended(job_id: str, when: dt.datetime) -> Job:
    created = ago(days=99).isoformat()
    return Job(
        id=job_id,
        owner="me",
        identity=job_id,
        name="n",
        device="cpu",
        created=created,
        state="succeeded",
        finished=when.isoformat(),
    )


def item(name: str, **age: float) -> Item:
    return Item(Path(name), ago(**age))


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (NOTHING, Expired()),
        (
            Contents(
                (ended("a", ago(days=11)), ended("b", ago(days=9))), frozenset("ab"), (), (), ()
            ),
            Expired(jobs=("a",)),
        ),
        (
            Contents(
                (ended("a", ago(days=11)), ended("b", ago(days=11))),
                frozenset("ab"),
                (),
                (),
                (),
                frozenset("a"),
            ),
            Expired(jobs=("b",)),
        ),
        (
            Contents(
                (),
                frozenset("k"),
                (item("u/k", days=50), item("u/x", hours=25), item("u/y", hours=23)),
                (),
                (),
            ),
            Expired(folders=(Path("u/x"),)),
        ),
        (
            Contents(
                (),
                frozenset("k"),
                (),
                (item("r/k", days=50), item("r/x", days=11), item("r/y", days=9)),
                (),
            ),
            Expired(folders=(Path("r/x"),)),
        ),
        (
            Contents(
                (),
                frozenset(),
                (),
                (),
                (item("s/old", days=10, hours=2), item("s/found", days=10, minutes=30)),
            ),
            Expired(artifacts=(item("s/old", days=10, hours=2),)),
        ),
    ],
    ids=["nothing", "jobs", "promoted", "uploads", "reports", "artifacts"],
)
def test_what_has_served_its_time(contents: Contents, expected: Expired) -> None:
    assert expired(contents, NOW, SETTINGS) == expected


class Text(Artifact):
    pass


def make(folder: Path) -> Text:
    (folder / "text").write_text("hello")
    return Text(root=folder, file="text")


class Home:
    """A home with old and new jobs."""

    def __init__(self, home: Path) -> None:
        self.folders, self.database = Folders(home), Database(home / "crucible.db")
        self.jobs, self.settings = JobStore(self.database), Settings(home=home)

    def job(self, *, end: bool) -> Job:
        """A job of today with all its files, ended or not."""
        job = new_job(self.folders, "n")
        self.jobs.add(job, dt.datetime.now(dt.UTC))
        if end:
            self.jobs.append(job.id, CancelAsked(), dt.datetime.now(dt.UTC))
        for folder in (self.folders.work(job.id).root, self.folders.report(job.id)):
            folder.mkdir(parents=True)
            (folder / "file").write_bytes(b"x" * 5000)
        return job

    def files(self, job: Job) -> list[bool]:
        return [
            folder.exists()
            for folder in (
                self.folders.uploads(job.id),
                self.folders.work(job.id).root,
                self.folders.report(job.id),
            )
        ]

    def collect(self, days: float, dry_run: bool = False) -> Collected:
        """As it will be in some days."""
        return collect(
            self.settings,
            self.jobs,
            lambda: dt.datetime.now(dt.UTC) + dt.timedelta(days=days),
            dry_run,
        )


@pytest.fixture
def old(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_a_job_that_has_ended_goes_with_all_its_files_and_one_that_has_not_stays(old: Home) -> None:
    gone, waiting = old.job(end=True), old.job(end=False)
    assert old.collect(29) == Collected(0, 0, 0, 0)
    report = old.collect(31, dry_run=True)
    assert (report.jobs, old.files(gone)) == (1, [True, True, True])
    assert report.freed_bytes > 10_000
    assert old.collect(31) == report
    assert (old.files(gone), old.files(waiting)) == ([False] * 3, [True] * 3)
    assert old.jobs.ids() == {waiting.id}
    assert old.collect(31) == Collected(0, 0, 0, 0)


def test_entries_of_the_audit_go_after_their_own_time(old: Home) -> None:
    def then() -> dt.datetime:
        return dt.datetime.now(dt.UTC) - dt.timedelta(days=old.settings.audit_days + 1)

    Audit(old.database, then).record(Entry(SERVICE, "key.created", "key/1"))
    assert old.collect(0, dry_run=True).audit_entries == 1
    assert old.collect(0).audit_entries == 1
    assert old.collect(0).audit_entries == 0


def test_folders_of_no_job_go_and_those_of_a_damaged_row_stay(old: Home) -> None:
    damaged, lost = old.job(end=True), old.job(end=True)
    with old.database.write() as rows:
        rows.exec_driver_sql("UPDATE jobs SET job = '{' WHERE id = ?", (damaged.id,))
    old.jobs.remove(lost.id)
    assert old.collect(0.9).folders == 0
    assert (old.collect(1.1).folders, old.files(lost)) == (1, [False, True, True])
    assert (old.collect(31).folders, old.files(lost)) == (2, [False] * 3)
    assert old.files(damaged) == [True] * 3


def test_an_upload_that_still_grows_stays(old: Home) -> None:
    folder = old.folders.uploads("growing")
    folder.mkdir(parents=True)
    os.utime(folder, (0, 0))
    (folder / "model").touch()
    os.utime(folder, (0, 0))
    assert old.collect(0.5).folders == 0


@pytest.mark.parametrize(
    "open_store",
    [lambda store, home: store, lambda store, home: Store(home / "job", shared=home)],
    ids=["own", "shared"],
)
def test_an_artifact_goes_unless_it_was_used(
    old: Home, open_store: Callable[[Store, Path], Store]
) -> None:
    store = Store(old.settings.home)
    used, unused = Key("build", 1, ("kept",)), Key("build", 1, ("unused",))
    folders = [store.get(key, Text, make).value.root for key in (used, unused)]
    for folder in folders:
        os.utime(folder / "artifact.json", (0, 0))
    assert open_store(store, old.settings.home).find(used, Text)
    assert old.collect(0, dry_run=True).artifacts == 1
    assert old.collect(0).artifacts == 1
    assert [folder.exists() for folder in folders] == [True, False]
    assert store.remove(folders[0], 0.0) is False  # it was used since
    assert store.remove(folders[1], 0.0) is False
    assert list((old.settings.home / "tmp").iterdir()) == []


def test_the_server_tidies_when_it_starts(old: Home, tmp_path: Path) -> None:
    gone = old.job(end=True)

    async def story(desk: Desk) -> None:
        while old.files(gone) != [False] * 3:
            await asyncio.sleep(0.01)
        assert (await desk.client.get(f"/jobs/{gone.id}")).status_code == 404

    at_desk(tmp_path, story, retention_days=1e-9)


def gc(home: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pipeline.cli", "gc", "--home", str(home), *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "CRUCIBLE_SERVICE_RETENTION_DAYS": "1e-9"},
    )


def test_gc_says_what_it_removes(old: Home, tmp_path: Path) -> None:
    gone = old.job(end=True)
    result = gc(tmp_path, "--dry-run")
    assert (
        result.returncode,
        result.stdout.startswith(
            "would be removed: 1 jobs, 0 folders without a job, 0 artifacts; "
        ),
    ) == (0, True), result
    assert old.files(gone) == [True] * 3
    assert gc(tmp_path).stdout.startswith("removed: 1 jobs, ")
    assert old.files(gone) == [False] * 3
    absent = gc(tmp_path / "absent")
    assert (absent.returncode, "no folder" in absent.stderr) == (1, True)


def test_a_job_stays_as_long_as_a_version_that_its_report_proves(tmp_path: Path) -> None:
    async def story() -> None:
        async with shelf(tmp_path, versions=1) as here:
            for _ in range(3):
                await here.promote()
            jobs = {version.job for version in here.repository.get("m").versions}
            assert len(jobs) == 2  # the current one, and the one before it
        database = Database(tmp_path / "crucible.db")
        repository = Repository(database, Folders(tmp_path))

        def later() -> dt.datetime:
            return dt.datetime.now(dt.UTC) + dt.timedelta(days=31)

        report = collect(
            Settings(home=tmp_path), JobStore(database), later, promoted=repository.jobs()
        )
        assert (report.jobs, repository.jobs()) == (1, frozenset(jobs))
        assert all(Folders(tmp_path).report(job).is_dir() for job in jobs)
        assert repository.engine(repository.get("m").version()).path.is_file()
        database.close()

    asyncio.run(story())
