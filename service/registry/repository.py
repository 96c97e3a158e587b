"""The models of one home: their immutable versions, the current one, and the deployment options.

    home/models/<name>/<version>/engine/    a copy of the report's engine, moved here by one rename

Rows are written after the files and deleted before them. So a killed promotion can leave a folder
without a row: `sweep` removes it.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError

from pipeline.core.artifacts import Engine
from pipeline.errors import DamagedError, ModelError
from pipeline.execution.store import Manifest, read_manifest, sync
from pipeline.host.replace_folder import replace_folder
from pipeline.report.bundle import ENGINE_FILE, check_engine
from pipeline.report.files import JSON_NAME
from service import logs
from service.errors import Conflict, NotFound, NotOwned, Unprocessable
from service.jobs.publish import (
    DIGESTS,
    ENGINE,
    AnyEngine,
    check_form,
    published_engine,
    read_any_engine,
)
from service.jobs.store import DamagedRow
from service.registry.models import DeploymentOptions, Version, prunable, version_name
from service.storage.audit import Audit
from service.storage.audit_entry import SERVICE, Entry
from service.storage.database import Database
from service.storage.files import Files, delete_files, insert_files
from service.storage.layout import Folders
from service.storage.tables import model_states, models, versions

TAKE_AGAIN = (
    "`crucible models {model}` shows the job of the version, and `crucible promote {model} JOB` "
    "restores the engine from it; if the job is gone too, compile the model again"
)

log = logs.get("service.repository")


@dataclass(frozen=True, slots=True)
class Model:
    """All versions of one name."""

    name: str
    owner: str
    current: int
    versions: tuple[Version, ...]  # the newest first
    deployed: bool  # the server loads it, also after a restart
    options: DeploymentOptions | None  # of the last deployment

    def version(self, number: int | None = None) -> Version:
        """Return this version, or the current one; NotFound if it does not exist."""
        if number is None:
            number = self.current
        for version in self.versions:
            if version.version == number:
                return version
        numbers = ", ".join(str(version.version) for version in self.versions)
        raise NotFound(f"model '{self.name}' has no version {number}", f"it has {numbers}")


class Repository:
    """All models of one home. Thread-safe."""

    def __init__(self, database: Database, folders: Folders, files: Files | None = None) -> None:
        self._database, self._folders, self._audit = database, folders, Audit(database)
        self._files = files or Files(database, folders.home)

    def list(self, owner: str | None = None) -> tuple[Model, ...]:
        """The models by name; None: of all owners. Damaged models are logged and left out."""
        query = sa.select(models).order_by(models.c.name)
        if owner is not None:
            query = query.where(models.c.owner == owner)
        with self._database.read() as rows:
            model_rows = rows.execute(query).mappings().all()
            return tuple(_readable(rows, model_rows))

    def get(self, name: str, owner: str | None = None) -> Model:
        """The model of this name; NotFound if there is none, or if it has another owner."""
        with self._database.read() as rows:
            return _model(rows, _row(rows, name, owner))

    def revisions(self) -> dict[str, int]:
        """Return the revision of each model: it rises with every change of what servers load."""
        query = sa.select(models.c.name, models.c.revision)
        with self._database.read() as rows:
            return {row.name: row.revision for row in rows.execute(query)}

    def engine(self, version: Version) -> AnyEngine:
        """Read the description of the engine. The caller checks its files before loading them.

        DamagedError, with the way to restore it, if the engine is missing or its description has
        changed.
        """
        try:
            self._files.fetch(self._folder(version))
            return read_any_engine(self.engine_folder(version), _name(version))
        except ModelError as error:
            message = f"{_name(version)} is damaged: '{ENGINE_FILE}' is missing"
            raise DamagedError(message, self.remedy(version)) from error
        except DamagedError as error:
            raise DamagedError(error.message, self.remedy(version)) from error

    def remedy(self, version: Version) -> str:
        """The advice for a damaged version: its job if that has the engine, else a new compile."""
        report = self._folders.report(version.job)
        try:
            self._files.fetch(report)
            published_engine(report)
        except DamagedError:
            return "compile the model again, and promote that: its job has lost the engine too"
        override = " --override" if version.override else ""
        command = f"crucible promote {version.model} {version.job}{override}"
        return f"`{command}` takes the engine from its job again"

    def restore(self, version: Version, engine: Path) -> bool:
        """Replace a damaged engine by that of the version's job.

        Return True if it was damaged.
        """
        try:
            check_engine(self.engine(version), _name(version))
            return False
        except DamagedError as error:
            reason = error.message
        with self._staged(engine) as staged:
            folder = self._folder(version)
            folder.parent.mkdir(parents=True, exist_ok=True)
            replace_folder(staged, folder)
            sync(folder.parent)
        self._files.insert(self._files.upload(folder))
        log.warning("version.restored", model=version.model, version=version.version, reason=reason)
        return True

    @contextlib.contextmanager
    def _staged(self, engine: Path) -> Iterator[Path]:
        """Copy an engine, check the copy and sync it to disk. Remove it at the end unless moved."""
        staged = self._folders.models / f".{secrets.token_hex(8)}"
        try:
            shutil.copytree(engine, staged / ENGINE)
            check_engine(read_any_engine(staged / ENGINE))
            for path in (*staged.rglob("*"), staged):
                sync(path)
            yield staged
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def manifest(self, version: Version) -> Manifest:
        """Read the manifest of the engine's files; DamagedError if a file has changed."""
        engine = self.engine(version)
        try:
            check_engine(engine, _name(version))
        except DamagedError as error:
            raise DamagedError(error.message, self.remedy(version)) from error
        return read_manifest(engine.root)

    def engine_folder(self, version: Version) -> Path:
        return self._folder(version) / ENGINE

    def _folder(self, version: Version) -> Path:
        return self._folders.version(version.model, version.version)

    def hold(self, version: Version) -> contextlib.AbstractContextManager[None]:
        """Keep the engine's files on this host meanwhile."""
        return self._files.hold(self._folder(version))

    def lend(self, version: Version, job_id: str) -> None:
        """Copy into a job what it needs to measure a version: the version may be pruned meanwhile.

        DamagedError if a file is missing or has changed.
        """
        report = self._folders.report(version.job) / JSON_NAME
        try:
            check_engine(self.engine(version), _name(version))
        except DamagedError as error:
            raise DamagedError(error.message, self.remedy(version)) from error
        try:
            self._files.fetch(report.parent, (JSON_NAME, DIGESTS))
            self._files.fetch(self._folders.uploads(version.job))
            check_form(report.parent, JSON_NAME)
            self._folders.share_upload(version.job, job_id)
            folder = self._folders.compiled(job_id)
            # If the version's job was a benchmark, the folder has the files of that.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            shutil.copy(report, folder)
        except (FileNotFoundError, DamagedError) as error:
            reason = error.message if isinstance(error, DamagedError) else str(error)
            advice = "compile the model again, and promote that report"
            raise DamagedError(f"{_name(version)} is damaged: {reason}", advice) from error
        shutil.copytree(self.engine_folder(version), folder / ENGINE)

    def add(
        self,
        version: Version,
        engine: Path,
        current: bool,
        entry: Entry | None = None,
        newest: int | None = None,
    ) -> Version:
        """Add a new version, and `entry` to the audit, with its number. The repository assigns that
        and ignores `version.version`.

        `newest` is the newest version that the caller knows. If another server has added one of the
        same report since, that one is returned, and nothing is added. Conflict if the name belongs
        to another owner.
        """
        with self._staged(engine) as staged, contextlib.ExitStack() as transaction:
            stored = self._files.upload(staged, like=(self._folders.report(version.job),))
            rows = transaction.enter_context(self._database.write())
            self._database.lock(rows, f"model {version.model}")  # it may have no row to lock
            added = _numbered(rows, version)
            if newest is not None and (same := _promoted_since(rows, version, newest)):
                return same
            folder = self._folders.version(added.model, added.version)
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)  # a promotion was killed before its row
            staged.rename(folder)
            sync(folder.parent)
            _insert(rows, added, current)
            name = str(folder.relative_to(self._folders.home))
            insert_files(rows, [replace(file, folder=name) for file in stored])
            if entry is not None:
                numbered = {**entry.details, "version": added.version}
                self._audit.add(rows, replace(entry, details=numbered))
        return added

    def set_current(self, name: str, version: int, entry: Entry | None = None) -> None:
        """Make a version current, and add `entry` to the audit."""
        with self._database.write() as rows:
            change = sa.update(models).where(models.c.name == name)
            rows.execute(change.values(current=version, revision=models.c.revision + 1))
            if entry is not None:
                self._audit.add(rows, entry)

    def set_deployed(
        self, name: str, options: DeploymentOptions | None, entry: Entry | None = None
    ) -> None:
        """Store that the model is deployed with these options, and add `entry` to the audit.

        None: it is not deployed any more; its last options are kept.
        """
        values: dict[str, object] = {"revision": models.c.revision + 1, "deployed": 0}
        if options is not None:
            values |= {"deployed": 1, "deployment": options.model_dump_json()}
        with self._database.write() as rows:
            rows.execute(sa.update(models).where(models.c.name == name).values(values))
            if entry is not None:
                self._audit.add(rows, entry)

    def set_memory(self, version: Version, memory_bytes: int) -> None:
        """Store the memory of one instance after loading, if it is the lowest so far; 0: unknown.

        A higher value may include memory of other processes on the GPU.
        """
        if memory_bytes <= 0:
            return
        stored = versions.c.memory_bytes
        lower = (
            sa.update(versions)
            .where(versions.c.model == version.model, versions.c.version == version.version)
            .where(stored.is_(None) | (stored > memory_bytes))
        )
        with self._database.write() as rows:
            rows.execute(lower.values(memory_bytes=memory_bytes))

    def remove(self, name: str, numbers: Collection[int]) -> None:
        """Remove versions, but never the current one.

        A rollback to a removed version goes to the version before that.
        """
        with self._database.write() as rows:
            self._database.lock(rows, f"model {name}")
            row = sa.select(models.c.current).where(models.c.name == name)
            current = rows.scalar(row.with_for_update())
            removed = sorted(set(numbers) - {current})
            for version in removed:
                _delete(rows, name, version)
            delete_files(rows, [f"models/{name}/{version}" for version in removed])
            for version in removed:  # all rows first: the audit makes other servers wait
                entry = Entry(SERVICE, "version.removed", f"model/{name}", {"version": version})
                self._audit.add(rows, entry)
        for version in removed:
            shutil.rmtree(self._folders.version(name, version), ignore_errors=True)
            log.info("version.removed", model=name, version=version)

    def prune(self, name: str, used: Collection[int], keep: int) -> tuple[int, ...]:
        """Remove the versions that `prunable` names; return them. Those that another server has
        loaded count as used.
        """
        model = self.get(name)
        elsewhere = sa.select(model_states.c.version).where(model_states.c.model == name)
        with self._database.read() as rows:
            in_use = {model.current, *used, *filter(None, rows.scalars(elsewhere))}
        if model.deployed and model.options and model.options.version:
            in_use.add(model.options.version)
        old = prunable(model.versions, in_use, keep)
        if old:
            self.remove(name, old)
        return old

    def jobs(self) -> frozenset[str]:
        """The jobs whose reports prove a stored version."""
        with self._database.read() as rows:
            return frozenset(rows.scalars(sa.select(versions.c.job_id)))

    def sweep(self) -> int:
        """Remove folders without a version; return their number. Not during a promotion."""
        with self._database.read() as rows:
            stored = rows.execute(sa.select(versions.c.model, versions.c.version))
            known = {(model, str(version)) for model, version in stored}
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
    """Return the engine of a version in this home; NotFound if it does not exist, Unprocessable if
    it is a language model.

    Only the folder is read, which appears by one rename: the database belongs to the server, which
    may be running. So an engine of a killed promotion is returned, too.
    """
    folders = Folders(home)
    if not (folders.version(model, version) / ENGINE).is_dir():
        names = [folder.name for folder in (folders.models / model).glob("*")]
        numbers = sorted(int(name) for name in names if name.isdecimal())
        content = f"it has no model '{model}'"
        if numbers:
            content = f"of '{model}' it has {', '.join(map(str, numbers))}"
        raise NotFound(
            f"no version {version} of '{model}' in '{home}'",
            f"{content}; set CRUCIBLE_HOME for another home, or use --from for any engine",
        )
    name = version_name(model, version)
    try:
        engine = read_any_engine(folders.version(model, version) / ENGINE, name)
        check_engine(engine, name)
    except DamagedError as error:
        raise DamagedError(error.message, TAKE_AGAIN.format(model=model)) from error
    if not isinstance(engine, Engine):
        raise Unprocessable(
            f"{name} is a language model, expected one with inputs and outputs",
            "name another model",
        )
    return engine


def _name(version: Version) -> str:
    return version_name(version.model, version.version)


def _numbered(rows: sa.Connection, version: Version) -> Version:
    """Return the version with the next number, and with the current version as `before`."""
    row = rows.execute(_named(version.model)).mappings().first()
    if row is None:
        return version.model_copy(update={"version": 1, "before": None})
    if row["owner"] != version.owner:
        raise Conflict(f"the name '{version.model}' is taken", "choose another name")
    return version.model_copy(update={"version": row["latest"] + 1, "before": row["current"]})


def _promoted_since(rows: sa.Connection, version: Version, newest: int) -> Version | None:
    """Return the version of the same report that is newer than `newest`, if there is one."""
    since = (versions.c.model == version.model) & (versions.c.version > newest)
    query = sa.select(versions).where(since, versions.c.job_id == version.job)
    row = rows.execute(query.order_by(versions.c.version.desc())).mappings().first()
    return None if row is None else _version(row)


def _insert(rows: sa.Connection, version: Version, current: bool) -> None:
    name, number = version.model, version.version
    model = sa.update(models).where(models.c.name == name)
    if number == 1:
        row = {"name": name, "owner": version.owner, "current": number, "latest": number}
        rows.execute(sa.insert(models).values(row))
    else:
        rows.execute(model.values(latest=number))
    if current:
        rows.execute(model.values(current=number, revision=models.c.revision + 1))
    row_of_version = {
        "model": name,
        "version": number,
        "job_id": version.job,
        "before": version.before,
        "about": version.model_dump_json(),
    }
    rows.execute(sa.insert(versions).values(row_of_version))


def _delete(rows: sa.Connection, name: str, version: int) -> None:
    """Delete a version. A rollback to it goes to the version before it."""
    of_model, this = versions.c.model == name, versions.c.version == version
    before = rows.scalar(sa.select(versions.c.before).where(of_model, this))
    after = sa.update(versions).where(of_model, versions.c.before == version)
    rows.execute(after.values(before=before))
    rows.execute(sa.delete(versions).where(of_model, this))


def _named(name: str) -> sa.Select[Any]:
    return sa.select(models).where(models.c.name == name)


def _row(rows: sa.Connection, name: str, owner: str | None) -> sa.RowMapping:
    row = rows.execute(_named(name)).mappings().first()
    if row is None or owner not in (None, row["owner"]):
        refusal = NotFound if row is None else NotOwned
        raise refusal(f"no model '{name}'", "GET /models lists yours")
    return row


def _model(rows: sa.Connection, row: sa.RowMapping) -> Model:
    """Read a model with its versions. DamagedRow names the model."""
    query = sa.select(versions).where(versions.c.model == row["name"])
    version_rows = rows.execute(query.order_by(versions.c.version.desc())).mappings().all()
    try:
        read = tuple(_version(version_row) for version_row in version_rows)
        options = (
            DeploymentOptions.model_validate_json(row["deployment"]) if row["deployment"] else None
        )
    except ValidationError as error:
        raise DamagedRow(
            f"the database rows of model '{row['name']}' are damaged: {error}",
            "promote its report under another name",
        ) from error
    return Model(row["name"], row["owner"], row["current"], read, bool(row["deployed"]), options)


def _version(row: sa.RowMapping) -> Version:
    return Version.model_validate_json(row["about"]).model_copy(
        update={"before": row["before"], "memory_bytes": row["memory_bytes"]}
    )


def _readable(rows: sa.Connection, model_rows: Iterable[sa.RowMapping]) -> Iterable[Model]:
    """Yield the models; log and skip those with damaged rows."""
    for row in model_rows:
        try:
            yield _model(rows, row)
        except DamagedRow as error:
            log.error("model.damaged", model=row["name"], error=error.message)
