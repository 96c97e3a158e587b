"""The models of one home: versions that never change, which of them is current, and how each model
is to be served.

    home/models/<name>/<version>/engine/    a copy of the report's, put there by one rename

A folder without a row is what a killed promotion left: `sweep` removes it. Rows are written after
the files, and go before them.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from pipeline.core import Engine
from pipeline.errors import DamagedError, ModelError
from pipeline.execution.store import Manifest, read_manifest, sync
from pipeline.host.replace_folder import replace_folder
from pipeline.report.bundle import ENGINE_FILE, check_engine, read_engine
from pipeline.report.files import JSON_NAME
from service import logs
from service.errors import Conflict, NotFound
from service.jobs.publish import ENGINE, check_form, published_engine
from service.jobs.store import DamagedRow
from service.registry.models import DeploymentOptions, Version, prunable, version_name
from service.storage.database import Database
from service.storage.layout import Folders

TAKE_AGAIN = (
    "`crucible models {model}` names its job, and `crucible promote {model} JOB` takes the engine "
    "from there again; if that is gone too, compile the model again"
)

log = logs.get("service.repository")


@dataclass(frozen=True, slots=True)
class Model:
    """All versions of one name."""

    name: str
    owner: str
    current: int
    versions: tuple[Version, ...]  # the newest first
    deployed: bool  # is to be loaded, also after a restart
    options: DeploymentOptions | None  # as it was deployed last

    def version(self, number: int | None = None) -> Version:
        """This version, or the current one; NotFound if it is not there."""
        wanted = self.current if number is None else number
        found = next((each for each in self.versions if each.version == wanted), None)
        if found is None:
            kept = ", ".join(str(each.version) for each in self.versions)
            raise NotFound(f"model '{self.name}' has no version {wanted}", f"it has {kept}")
        return found


class Repository:
    """All models of one home. Safe for threads."""

    def __init__(self, database: Database, folders: Folders) -> None:
        self._database, self._folders = database, folders

    def list(self, owner: str | None = None) -> tuple[Model, ...]:
        """By name; None: of all owners. What is damaged is logged and left out."""
        with self._database.read() as rows:
            found = rows.execute(
                "SELECT * FROM models WHERE ?1 IS NULL OR owner = ?1 ORDER BY name", (owner,)
            ).fetchall()
            return tuple(_readable(rows, found))

    def get(self, name: str, owner: str | None = None) -> Model:
        """NotFound if there is none, or if it is another owner's."""
        with self._database.read() as rows:
            return _model(rows, _row(rows, name, owner))

    def engine(self, version: Version) -> Engine:
        """The engine, with where its files lie; whoever loads them checks them first.

        DamagedError, with what brings it back, if it is not there or not as it was described.
        """
        try:
            return read_engine(self.engine_folder(version), _name(version))
        except ModelError as error:
            message = f"{_name(version)} is damaged: '{ENGINE_FILE}' is missing"
            raise DamagedError(message, self.remedy(version)) from error
        except DamagedError as error:
            raise DamagedError(error.message, self.remedy(version)) from error

    def remedy(self, version: Version) -> str:
        """What brings a damaged version back: its job if that has the engine, else a compile."""
        try:
            published_engine(self._folders.report(version.job))
        except DamagedError:
            return "compile the model again, and promote that: its job has lost the engine too"
        override = " --override" if version.override else ""
        command = f"crucible promote {version.model} {version.job}{override}"
        return f"`{command}` takes the engine from its job again"

    def restore(self, version: Version, engine: Path) -> bool:
        """Put the engine of a version's job in the place of a damaged one.

        Return whether it was damaged.
        """
        try:
            check_engine(self.engine(version), _name(version))
            return False
        except DamagedError as error:
            reason = error.message
        with self._staged(engine) as staged:
            place = self._folders.version(version.model, version.version)
            place.parent.mkdir(parents=True, exist_ok=True)
            replace_folder(staged, place)
            sync(place.parent)
        log.warning("version.restored", model=version.model, version=version.version, reason=reason)
        return True

    @contextlib.contextmanager
    def _staged(self, engine: Path) -> Iterator[Path]:
        """A checked copy of an engine, on the disk; removed at the end unless it was moved."""
        staged = self._folders.models / f".{secrets.token_hex(8)}"
        try:
            shutil.copytree(engine, staged / ENGINE)
            check_engine(read_engine(staged / ENGINE))
            for path in (*staged.rglob("*"), staged):
                sync(path)
            yield staged
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def manifest(self, version: Version) -> Manifest:
        """What the engine's files were when they were made; DamagedError unless all are so
        still.
        """
        engine = self.engine(version)
        try:
            check_engine(engine, _name(version))
        except DamagedError as error:
            raise DamagedError(error.message, self.remedy(version)) from error
        return read_manifest(engine.root)

    def engine_folder(self, version: Version) -> Path:
        return self._folders.version(version.model, version.version) / ENGINE

    def lend(self, version: Version, job_id: str) -> None:
        """Give a job what it takes to measure a version again, which may be pruned meanwhile.

        DamagedError unless all is there and as it was.
        """
        report = self._folders.report(version.job) / JSON_NAME
        try:
            check_engine(self.engine(version), _name(version))
        except DamagedError as error:
            raise DamagedError(error.message, self.remedy(version)) from error
        try:
            check_form(report.parent, JSON_NAME)
            self._folders.share_upload(version.job, job_id)
            place = self._folders.compiled(job_id)
            shutil.rmtree(
                place, ignore_errors=True
            )  # what the version's own job measured, if that was a benchmark
            place.mkdir()
            shutil.copy(report, place)
        except (FileNotFoundError, DamagedError) as error:
            reason = error.message if isinstance(error, DamagedError) else str(error)
            advice = "compile the model again, and promote that report"
            raise DamagedError(f"{_name(version)} is damaged: {reason}", advice) from error
        shutil.copytree(self.engine_folder(version), place / ENGINE)

    def add(self, version: Version, engine: Path, current: bool) -> Version:
        """Add the next version, whose number replaces the one given; Conflict if the name is
        another owner's.
        """
        with self._staged(engine) as staged, self._database.write() as rows:
            added = _numbered(rows, version)
            place = self._folders.version(added.model, added.version)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(place, ignore_errors=True)  # a promotion was killed before its row
            staged.rename(place)
            sync(place.parent)
            _insert(rows, added, current)
        return added

    def set_current(self, name: str, version: int) -> None:
        with self._database.write() as rows:
            rows.execute("UPDATE models SET current = ? WHERE name = ?", (version, name))

    def set_deployed(self, name: str, options: DeploymentOptions | None) -> None:
        """It is to be served so from now on; None: no longer, but as before if it is asked for
        again.
        """
        with self._database.write() as rows:
            if options is None:
                rows.execute("UPDATE models SET deployed = 0 WHERE name = ?", (name,))
            else:
                rows.execute(
                    "UPDATE models SET deployed = 1, deployment = ? WHERE name = ?",
                    (options.model_dump_json(), name),
                )

    def set_memory(self, version: Version, memory_bytes: int) -> None:
        """What one instance held when it was loaded; 0: not known. The least counts: on a GPU
        others may have taken memory at the same time.
        """
        with self._database.write() as rows:
            rows.execute(
                "UPDATE versions SET memory_bytes = min(coalesce(memory_bytes, ?1), ?1) WHERE ?1 >"
                " 0 AND model = ?2 AND version = ?3",
                (memory_bytes, version.model, version.version),
            )

    def remove(self, name: str, versions: Collection[int]) -> None:
        """Forget versions, but never the current one. A rollback that would have led there leads to
        the one before.
        """
        with self._database.write() as rows:
            current = rows.execute("SELECT current FROM models WHERE name = ?", (name,)).fetchone()[
                "current"
            ]
            gone = sorted(set(versions) - {current})
            for version in gone:
                before = rows.execute(
                    "SELECT before FROM versions WHERE model = ? AND version = ?", (name, version)
                ).fetchone()
                rows.execute(
                    "UPDATE versions SET before = ? WHERE model = ? AND before = ?",
                    (before and before["before"], name, version),
                )
                rows.execute(
                    "DELETE FROM versions WHERE model = ? AND version = ?", (name, version)
                )
        for version in gone:
            shutil.rmtree(self._folders.version(name, version), ignore_errors=True)
            log.info("version.removed", model=name, version=version)

    def prune(self, name: str, used: Collection[int], keep: int) -> tuple[int, ...]:
        """Remove versions that need not be kept."""
        model = self.get(name)
        pinned = (
            [model.options.version]
            if model.deployed and model.options and model.options.version
            else []
        )
        old = prunable(model.versions, {model.current, *pinned, *used}, keep)
        if old:
            self.remove(name, old)
        return old

    def jobs(self) -> frozenset[str]:
        """Jobs whose reports prove a version that is kept."""
        with self._database.read() as rows:
            return frozenset(row["job_id"] for row in rows.execute("SELECT job_id FROM versions"))

    def sweep(self) -> int:
        """Remove folders of no version: how many there were. Not beside a promotion."""
        with self._database.read() as rows:
            known = {
                (row["model"], str(row["version"]))
                for row in rows.execute("SELECT model, version FROM versions")
            }
        staged = [folder for folder in self._folders.models.glob(".*") if folder.is_dir()]
        orphans = [
            folder
            for folder in self._folders.models.glob("[!.]*/*")
            if (folder.parent.name, folder.name) not in known
        ]
        for folder in (*staged, *orphans):
            shutil.rmtree(folder, ignore_errors=True)
        return len(staged) + len(orphans)

    def close(self) -> None:
        """Close the calling thread's connection."""
        self._database.close()


def promoted_engine(home: Path, model: str, version: int) -> Engine:
    """The engine of a version in this home; NotFound if it is not there.

    Found by its folder, which appears whole: the database is left to the server, which may run.
    What a killed promotion left is found, too.
    """
    folders = Folders(home)
    if not (folders.version(model, version) / ENGINE).is_dir():
        kept = ", ".join(
            sorted(
                (each.name for each in (folders.models / model).glob("*") if each.name.isdecimal()),
                key=int,
            )
        )
        there = f"of '{model}' it has {kept}" if kept else f"it has no model '{model}'"
        raise NotFound(
            f"no version {version} of '{model}' in '{home}'",
            f"{there}; CRUCIBLE_HOME names another home, --from any engine",
        )
    name = version_name(model, version)
    try:
        engine = read_engine(folders.version(model, version) / ENGINE, name)
        check_engine(engine, name)
    except DamagedError as error:
        raise DamagedError(error.message, TAKE_AGAIN.format(model=model)) from error
    return engine


def _name(version: Version) -> str:
    return version_name(version.model, version.version)


def _numbered(rows: sqlite3.Connection, version: Version) -> Version:
    """The version with its number, and with what is current now as the one before it."""
    row = rows.execute("SELECT * FROM models WHERE name = ?", (version.model,)).fetchone()
    if row is None:
        return version.model_copy(update={"version": 1, "before": None})
    if row["owner"] != version.owner:
        raise Conflict(f"the name '{version.model}' is taken", "choose another name")
    return version.model_copy(update={"version": row["latest"] + 1, "before": row["current"]})


def _insert(rows: sqlite3.Connection, version: Version, current: bool) -> None:
    name, number = version.model, version.version
    values = (name, version.owner, number, number)
    rows.execute(
        "INSERT INTO models (name, owner, current, latest) VALUES (?, ?, ?, ?) ON CONFLICT (name)"
        " DO UPDATE SET latest = excluded.latest",
        values,
    )
    if current:
        rows.execute("UPDATE models SET current = ? WHERE name = ?", (number, name))
    about = version.model_dump_json()
    rows.execute(
        "INSERT INTO versions (model, version, job_id, before, about) VALUES (?, ?, ?, ?, ?)",
        (name, number, version.job, version.before, about),
    )


def _row(rows: sqlite3.Connection, name: str, owner: str | None) -> sqlite3.Row:
    row: sqlite3.Row | None = rows.execute(
        "SELECT * FROM models WHERE name = ?1 AND (?2 IS NULL OR owner = ?2)", (name, owner)
    ).fetchone()
    if row is None:
        raise NotFound(f"no model '{name}'", "GET /models lists yours")
    return row


def _model(rows: sqlite3.Connection, row: sqlite3.Row) -> Model:
    """DamagedRow names the model."""
    found = rows.execute(
        "SELECT * FROM versions WHERE model = ? ORDER BY version DESC", (row["name"],)
    ).fetchall()
    try:
        versions = tuple(_version(each) for each in found)
        options = (
            DeploymentOptions.model_validate_json(row["deployment"]) if row["deployment"] else None
        )
    except ValidationError as error:
        raise DamagedRow(
            f"the rows of model '{row['name']}' in the database are damaged: {error}",
            "promote its report under another name",
        ) from error
    return Model(
        row["name"], row["owner"], row["current"], versions, bool(row["deployed"]), options
    )


def _version(row: sqlite3.Row) -> Version:
    return Version.model_validate_json(row["about"]).model_copy(
        update={"before": row["before"], "memory_bytes": row["memory_bytes"]}
    )


def _readable(rows: sqlite3.Connection, found: Iterable[sqlite3.Row]) -> Iterable[Model]:
    for row in found:
        try:
            yield _model(rows, row)
        except DamagedRow as error:
            log.error("model.damaged", model=row["name"], error=error.message)
