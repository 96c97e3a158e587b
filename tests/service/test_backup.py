"""docs/howto/operate-servers.md: a dump of PostgreSQL and a copy of the bucket are a backup."""

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tests.pipeline.execution.s3 import BUCKET, object_names
from tests.service.builders.app import opened_desk
from tests.service.builders.postgresql import BINARIES, Server


def run(program: str, *arguments: str | Path) -> None:
    """Run a program of PostgreSQL, which must succeed."""
    subprocess.run([BINARIES / program, *arguments], check=True, capture_output=True)


def plain(url: str) -> str:
    """The address of a database as PostgreSQL's programs take it."""
    return sa.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def test_a_dump_and_a_later_copy_of_the_bucket_are_a_backup(
    tmp_path: Path, postgresql: str, postgresql_server: Server, s3: Any
) -> None:
    dump, home = tmp_path / "crucible.dump", tmp_path / "a"
    home.mkdir()

    async def at_first() -> str:
        async with opened_desk(
            home, database_url=postgresql, files_url="s3://bucket/files"
        ) as desk:
            kept = await desk.end_of("succeed")
            await asyncio.to_thread(
                run, "pg_dump", "--format=custom", f"--file={dump}", plain(postgresql)
            )
            later = await desk.end_of("succeed-2")
            assert (kept["state"], later["state"]) == ("succeeded", "succeeded")
            return str(kept["id"])

    async def restored(url: str) -> list[dict[str, Any]]:
        async with opened_desk(
            tmp_path / "b", database_url=url, files_url="s3://bucket/copy"
        ) as desk:
            report = await desk.client.get(f"/reports/{job}/engine.tar")
            assert report.status_code == 200, report.text
            assert (await desk.end_of("succeed-3"))["state"] == "succeeded"
            return list((await desk.client.get("/jobs")).json()["jobs"])

    job = asyncio.run(at_first())
    for name in object_names(s3):
        source = {"Bucket": BUCKET, "Key": name}
        s3.copy_object(Bucket=BUCKET, Key=name.replace("files/", "copy/", 1), CopySource=source)
    with postgresql_server.database("template0") as url:
        run("pg_restore", "--no-owner", f"--dbname={plain(url)}", dump)
        (tmp_path / "b").mkdir()
        jobs = asyncio.run(restored(url))
    assert [each["name"] for each in jobs] == ["succeed-3", "succeed"], "later jobs are not known"
