"""Files in S3: what is here, what goes, and what no server may remove or replace."""

import datetime as dt
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from pipeline.errors import DamagedError, PlanError, StoreError
from pipeline.execution.object_store import ObjectStore
from service.devices.leases import utc_now
from service.jobs.claims import Claims
from service.jobs.state import Started, Succeeded
from service.jobs.store import ClaimLost, JobStore
from service.settings import Settings, settings_from
from service.storage.database import Database
from service.storage.files import RECENT_S, Files, files_from
from service.storage.layout import Folders
from service.storage.tables import files as table
from tests.pipeline.execution.s3 import BUCKET, object_names
from tests.service.builders.jobs import new_job

URL = "s3://bucket/files"
LATER = dt.timedelta(days=2)


@pytest.fixture
def database(postgresql: str) -> Iterator[Database]:
    with closing(Database(postgresql)) as database:
        yield database


@pytest.fixture
def host(database: Database, s3: Any) -> Callable[..., Files]:
    """The files of a host with this home."""

    def files_of(home: Path, cache_bytes: int = 2**30) -> Files:
        home.mkdir(exist_ok=True)
        return Files(database, home, ObjectStore(URL, "FILES_URL", wait_s=0.5), cache_bytes)

    return files_of


def filled(folder: Path, content: bytes = b"hello") -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "one").write_bytes(content)
    (folder / "sub" / "two").write_bytes(content + b"2")
    return folder


def store(files: Files, folder: Path, content: bytes = b"hello") -> Path:
    files.insert(files.upload(filled(folder, content)))
    return folder


def age(*folders: Path) -> None:
    """Let the folders have been used long ago, the first one last."""
    for number, folder in enumerate(folders, 1):
        used_s = utc_now().timestamp() - RECENT_S - 60 * number
        os.utime(folder, (used_s, used_s))


def names_of(s3: Any) -> set[str]:
    """The folders that have objects."""
    return {"/".join(name.split("/")[1:3]) for name in object_names(s3)}


def test_a_folder_of_one_host_is_the_same_on_another_one(
    host: Callable[..., Files], tmp_path: Path
) -> None:
    store(host(tmp_path / "a"), tmp_path / "a" / "reports" / "x")
    other, copy = host(tmp_path / "b"), tmp_path / "b" / "reports" / "x"
    assert other.fetch(copy, ("one",))
    assert (copy / "one").read_bytes() == b"hello"
    assert not (copy / "sub").exists(), "only what is asked for"
    assert other.fetch(copy)
    assert (copy / "sub" / "two").read_bytes() == b"hello2"
    assert not other.fetch(tmp_path / "b" / "reports" / "none")
    assert list((tmp_path / "b" / "fetched").iterdir()) == []


def test_a_copy_that_has_changed_is_fetched_again(
    host: Callable[..., Files], tmp_path: Path
) -> None:
    files, folder = host(tmp_path / "a"), tmp_path / "a" / "reports" / "x"
    store(files, folder)
    (folder / "one").write_bytes(b"hellO")
    (folder / "sub" / "two").unlink()
    (folder / "sub" / "two").symlink_to("/etc/passwd")
    files.fetch(folder)
    assert (folder / "one").read_bytes() == b"hello"
    assert (folder / "sub" / "two").read_bytes() == b"hello2"
    assert not (folder / "sub" / "two").is_symlink()


def test_what_an_attempt_left_that_lost_its_job_does_not_stay(
    host: Callable[..., Files], tmp_path: Path
) -> None:
    """Its engine may have files of other names than that of the attempt whose report is stored."""
    store(host(tmp_path / "a"), tmp_path / "a" / "reports" / "x")
    other, copy = host(tmp_path / "b"), tmp_path / "b" / "reports" / "x"
    (copy / "engine").mkdir(parents=True)
    (copy / "engine" / "model.xml").write_text("of the attempt that lost the job")
    assert other.fetch(copy, ("one",))
    assert (copy / "engine" / "model.xml").exists(), "only one file was asked for"
    assert other.fetch(copy)
    here = {str(path.relative_to(copy)) for path in copy.rglob("*")}
    assert here == {"one", "sub", "sub/two"}


def test_a_file_that_cannot_be_fetched_leaves_what_is_here(
    host: Callable[..., Files], tmp_path: Path, s3: Any
) -> None:
    files, folder = host(tmp_path / "a"), tmp_path / "a" / "reports" / "x"
    store(files, folder)
    for name in object_names(s3):
        if "/reports/" in name:
            s3.put_object(Bucket=BUCKET, Key=name, Body=b"damaged")
    (folder / "one").unlink()
    with pytest.raises(DamagedError, match="'one' of reports/x is damaged: the object 'reports/x/"):
        files.fetch(folder)
    assert not (folder / "one").exists()
    assert files.fetch(folder, ("sub/two",))
    assert list((tmp_path / "a" / "fetched").iterdir()) == []


def test_the_least_recently_used_copy_goes_first_and_comes_back(
    host: Callable[..., Files], tmp_path: Path
) -> None:
    first = host(tmp_path / "a")
    folders = [store(first, tmp_path / "a" / "reports" / name) for name in ("x", "y", "z")]
    age(folders[0], folders[2], folders[1])
    small = host(tmp_path / "a", cache_bytes=25)  # of 11 bytes each
    small.shrink()
    assert [folder.exists() for folder in folders] == [True, False, True]
    assert small.fetch(folders[1])
    assert [folder.exists() for folder in folders] == [True, True, False], "it makes room"


def test_what_is_held_was_used_lately_or_is_nowhere_else_stays(
    host: Callable[..., Files], tmp_path: Path
) -> None:
    files, reports = host(tmp_path / "a", cache_bytes=1), tmp_path / "a" / "reports"
    held, recent = store(files, reports / "held"), store(files, reports / "recent")
    only_here = filled(reports / "only-here")
    age(held, only_here)
    with files.hold(held):
        files.shrink()
        assert all(folder.is_dir() for folder in (held, recent, only_here))
    files.shrink()
    assert not held.exists()
    assert recent.is_dir()
    assert only_here.is_dir()


def test_many_threads_fetch_one_folder_whole(host: Callable[..., Files], tmp_path: Path) -> None:
    store(host(tmp_path / "a"), tmp_path / "a" / "reports" / "x", b"x" * 2**20)
    other, copy = host(tmp_path / "b"), tmp_path / "b" / "reports" / "x"
    found = list[int]()

    def fetch() -> None:
        other.fetch(copy)
        found.append((copy / "one").stat().st_size)

    threads = [threading.Thread(target=fetch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [2**20] * 8


def test_old_objects_without_a_row_go_and_new_ones_stay(
    host: Callable[..., Files], tmp_path: Path, s3: Any
) -> None:
    files, home = host(tmp_path / "a"), tmp_path / "a"
    kept, gone = store(files, home / "uploads" / "kept"), store(files, home / "uploads" / "gone")
    files.upload(filled(home / "uploads" / "unfinished"))
    s3.put_object(Bucket=BUCKET, Key="files/builds/blobs/x", Body=b"of another kind")
    files.forget([gone])
    assert files.collect(utc_now()) == (0, 0), "all are new"
    assert files.collect(utc_now() + LATER, dry_run=True) == (4, 22)
    assert files.collect(utc_now() + LATER) == (4, 22)
    left = {name for name in names_of(s3) if not name.startswith("databases/")}
    assert left == {"uploads/kept", "builds/blobs"}
    assert host(tmp_path / "b").fetch(tmp_path / "b" / "uploads" / "kept")
    assert kept.is_dir()


def test_shared_objects_stay_as_long_as_one_folder_names_them(
    host: Callable[..., Files], tmp_path: Path, s3: Any
) -> None:
    files, uploads = host(tmp_path / "a"), tmp_path / "a" / "uploads"
    old, new = store(files, uploads / "old"), filled(uploads / "new")
    before = names_of(s3)
    files.insert(files.upload(new, like=(old,)))
    assert names_of(s3) == before, "nothing was uploaded"
    files.forget([old])
    files.collect(utc_now() + LATER)
    copy = tmp_path / "b" / "uploads" / "new"
    assert host(tmp_path / "b").fetch(copy)
    assert (copy / "one").read_bytes() == b"hello"
    later = files.upload(filled(uploads / "late"), like=(new,))
    files.forget([new])
    with pytest.raises(StoreError, match=r"that uploads/late shares have been removed"):
        files.insert(later)


def test_two_databases_do_not_remove_each_others_objects(
    host: Callable[..., Files], tmp_path: Path, postgresql_server: Any, migrated: str, s3: Any
) -> None:
    files = host(tmp_path / "a")
    store(files, tmp_path / "a" / "uploads" / "x")
    with postgresql_server.database(migrated) as url, closing(Database(url)) as other:
        stranger = Files(other, tmp_path / "b", ObjectStore(URL, "FILES_URL"), 2**30)
        for each in (stranger, files):
            with pytest.raises(StoreError, match="another database keeps its files in"):
                each.collect(utc_now() + LATER)
    assert "uploads/x" in names_of(s3)


def test_a_server_that_has_lost_its_job_replaces_nothing(
    host: Callable[..., Files], database: Database, tmp_path: Path
) -> None:
    """Its objects lie beside those of the next server, and its rows are refused."""
    jobs, home = JobStore(database), tmp_path / "a"
    job = new_job(Folders(home), "succeed")
    jobs.add(job, utc_now())
    files, report = host(home), home / "reports" / job.id
    claims = [Claims(database, name) for name in ("slow", "next")]
    slow = claims[0].claim(["cpu"], None)
    assert slow is not None
    jobs.append(job.id, Started(1, 1.0), utc_now(), token=slow.token)
    late = files.upload(filled(report, b"late"), slow.token)
    (following,) = claims[1].expired(None)
    stored = host(tmp_path / "b").upload(
        filled(tmp_path / "b" / "reports" / job.id, b"right"), following.token
    )
    ending = Succeeded("rejected", None)
    jobs.append(job.id, ending, utc_now(), token=following.token, files=stored)
    with pytest.raises(ClaimLost):
        jobs.append(job.id, ending, utc_now(), token=slow.token, files=late)
    assert not {file.object for file in stored} & {file.object for file in late}
    copy = tmp_path / "c" / "reports" / job.id
    assert host(tmp_path / "c").fetch(copy)
    assert (copy / "one").read_bytes() == b"right"


def test_a_removed_job_leaves_no_rows(
    host: Callable[..., Files], database: Database, tmp_path: Path
) -> None:
    jobs, home = JobStore(database), tmp_path / "a"
    job = new_job(Folders(home), "succeed")
    upload = host(home).upload(home / "uploads" / job.id)
    jobs.add(job, utc_now(), files=upload)
    again, is_new = jobs.add(job, utc_now(), files=upload)
    assert (again.id, is_new) == (job.id, False)
    jobs.append(job.id, Started(1, 1.0), utc_now())
    jobs.append(job.id, Succeeded("rejected", None), utc_now())
    jobs.remove(job.id)
    with database.read() as rows:
        count = sa.select(sa.func.count()).where(table.c.folder != "databases")
        assert rows.scalar(count.select_from(table)) == 0


def test_without_a_url_nothing_is_stored(database: Database, tmp_path: Path) -> None:
    files = files_from(Settings(home=tmp_path), database)
    folder = filled(tmp_path / "uploads" / "x")
    assert (files.are_shared, files.upload(folder), files.fetch(folder)) == (False, (), False)
    assert files.collect(utc_now() + LATER) == (0, 0)
    age(folder)
    files.shrink()
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FILES_URL": URL}, "files_url needs database_url"),
        ({"FILES_CACHE_BYTES": "0"}, "greater than 0"),
    ],
)
def test_settings_that_do_not_fit_are_named(variables: dict[str, str], message: str) -> None:
    environ = {f"CRUCIBLE_SERVICE_{name}": value for name, value in variables.items()}
    with pytest.raises(PlanError, match=message):
        settings_from(environ)


def test_a_url_of_another_kind_is_refused(database: Database, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, database_url="postgresql+psycopg://x", files_url="/files")
    with pytest.raises(PlanError, match="expected CRUCIBLE_SERVICE_FILES_URL=s3://bucket/prefix"):
        files_from(settings, database)
