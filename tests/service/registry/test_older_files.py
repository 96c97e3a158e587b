"""A home that was used without S3, and then with it: other servers find what it has."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from service.registry.older_files import older_folders, upload_older
from service.settings import Settings
from service.storage.database import Database
from service.storage.files import Files, StoredFile, files_from
from service.storage.layout import Folders
from service.storage.tables import files as table
from service.storage.tables import jobs
from tests.builders.cli import Result, crucible
from tests.service.builders.app import Desk, opened_desk
from tests.service.builders.jobs import write_out
from tests.service.serving.engines import linear
from tests.service.test_shared_files import URL, desk_of


@pytest.fixture
def older(tmp_path: Path, postgresql: str, s3: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of a job that has succeeded, and was promoted, and of one that has failed, in a home
    without S3. The environment of commands has it.
    """
    home = tmp_path / "a"
    write_out(home / "template", tmp_path / "store", real=linear(tmp_path / "made"))

    async def story() -> list[str]:
        async with opened_desk(home, database_url=postgresql) as desk:
            ended = [await desk.end_of(name) for name in ("succeed", "fail")]
            promotion = {"report": ended[0]["id"]}
            answer = await desk.client.post("/models/m/promote", json=promotion)
            assert answer.status_code == 200, answer.text
            return [job["id"] for job in ended]

    ids = asyncio.run(story())
    for job in ids:  # as an older version has written it
        plan = home / "uploads" / job / "plan.json"
        plan.write_text(plan.read_text().replace("$UPLOAD/", f"{plan.parent}/"))
    monkeypatch.setenv("CRUCIBLE_SERVICE_DATABASE_URL", postgresql)
    monkeypatch.setenv("CRUCIBLE_SERVICE_FILES_URL", URL)
    return ids


def upload_home(folder: Path, *options: str) -> Result:
    return crucible("upload-home", "--home", folder / "a", *options, cwd=folder)


def test_another_server_finds_what_was_uploaded_after_an_interruption(
    tmp_path: Path, postgresql: str, older: list[str]
) -> None:
    folders = Folders(tmp_path / "a")
    with closing(Database(postgresql)) as database:
        found = older_folders(database, folders)
        names = [str(each.folder.relative_to(folders.home)) for each in found]
        succeeded, failed = older
        assert names == [
            *(f"{kind}/{succeeded}" for kind in ("uploads", "jobs", "reports")),
            *(f"{kind}/{failed}" for kind in ("uploads", "jobs")),
            "models/m/1",
        ]
        files = files_from(Settings(home=folders.home, database_url="", files_url=URL), database)
        assert upload_older(database, folders, files, found[0])
        assert not upload_older(database, folders, files, found[0]), "it is stored"
    assert "would be uploaded: 5 folders" in upload_home(tmp_path, "--dry-run").out
    result = upload_home(tmp_path)
    assert (result.code, "uploaded: 5 of 5 folders" in result.out) == (0, True), result
    assert "uploaded: 0 of 0 folders" in upload_home(tmp_path).out

    async def story() -> None:
        async with desk_of(tmp_path / "b", postgresql) as desk:
            await check(desk)

    async def check(desk: Desk) -> None:
        for path in (f"/reports/{succeeded}", f"/reports/{succeeded}/engine.tar"):
            assert (await desk.client.get(path)).status_code == 200
        assert "I am fail" in (await desk.client.get(f"/jobs/{failed}/log")).text
        again = await desk.client.post(f"/jobs/{failed}/retry")
        assert again.status_code == 202, again.text
        ended = await desk.until(again.json()["id"], "succeeded", "failed")
        assert ended["failure"]["code"] == "model.invalid", "it ran"
        assert desk.service.files.fetch(desk.service.folders.version("m", 1))

    asyncio.run(story())


def test_a_version_shares_the_objects_of_its_report(
    tmp_path: Path, postgresql: str, older: list[str]
) -> None:
    assert upload_home(tmp_path).code == 0
    with closing(Database(postgresql)) as database, database.read() as rows:
        objects = [
            set(rows.scalars(sa.select(table.c.object).where(table.c.folder == folder)))
            for folder in ("models/m/1", f"reports/{older[0]}")
        ]
    assert objects[0] < objects[1]


def test_what_is_removed_meanwhile_is_not_named_again(
    tmp_path: Path, postgresql: str, older: list[str]
) -> None:
    folders = Folders(tmp_path / "a")
    with closing(Database(postgresql)) as database:
        found = older_folders(database, folders)
        with database.write() as rows:
            rows.execute(sa.delete(jobs).where(jobs.c.id == older[1]))
        files = files_from(Settings(home=folders.home, database_url="", files_url=URL), database)
        gone = next(each for each in found if each.job == older[1])
        assert not upload_older(database, folders, files, gone)
        with database.read() as rows:
            named = set(rows.scalars(sa.select(table.c.folder)))
        assert not any(older[1] in folder for folder in named)


def test_a_folder_that_is_removed_during_its_upload_is_left_out(
    tmp_path: Path, postgresql: str, older: list[str]
) -> None:
    class Removing(Files):
        def upload(self, folder: Path, *rest: Any, **more: Any) -> tuple[StoredFile, ...]:
            raise FileNotFoundError(folder)

    folders = Folders(tmp_path / "a")
    with closing(Database(postgresql)) as database:
        found = older_folders(database, folders)
        assert not upload_older(database, folders, Removing(database, folders.home), found[0])
        assert older_folders(database, folders) == found


def test_without_a_place_for_files_the_command_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CRUCIBLE_SERVICE_FILES_URL", raising=False)
    (tmp_path / "a").mkdir()
    result = upload_home(tmp_path)
    assert result.code == 1
    assert "CRUCIBLE_SERVICE_FILES_URL" in result.err
