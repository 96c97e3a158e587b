"""The content-addressed store: every artifact is made once, published whole, and found again by
what it was made from.

    <root>/artifacts/<stage>/<key>/     the files of one artifact, and artifact.json (value,
                                        provenance, sha256 of each file and of all that)
    <root>/locks/<key>.lock             held while an artifact is made
    <root>/tmp/<key>/                   where it is made; renamed into place when complete

Look, lock, look again, make, publish by one rename. A process killed at any moment leaves at most a
folder under tmp/, which the next holder of the same lock removes. Finding an artifact sets its
manifest's time: when it was last used.

A store may look in a second, `shared` one too, of which it writes no more than those times: so
works a job of the service, whose artifacts are adopted by the shared store after the job has ended
(`Store.adopt`).
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import os
import shutil
import stat
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.core import Artifact, Frozen, Note, Provenance, Target
from pipeline.errors import ChildDied, CrucibleError, DiskFull, InternalError, StoreError
from pipeline.execution.exit_causes import DISK_FAULTS, MORE_DISK, first_line

A = TypeVar("A", bound=BaseModel)
MANIFEST = "artifact.json"
PASSING = ".passing-"  # in the name of a folder whose artifact does not last, after its digest
LAYOUT = 2  # of this folder; raised when artifacts written before cannot be read any more
DIGITS = 16  # of a sha256 that a message shows
# a disk with less is full: libraries that fail to write do not always say why
MIN_FREE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Key:
    """What an artifact is made from. Equal keys mean equal artifacts."""

    stage: str
    version: int  # raised when the stage's code changes what it makes
    inputs: tuple[str, ...]  # content digests
    options: str = ""  # canonical JSON
    tools: Mapping[str, str] | None = None  # library -> version
    target: Target | None = None

    @property
    def digest(self) -> str:
        target = self.target.model_dump_json() if self.target else ""
        parts = [
            LAYOUT,
            self.stage,
            self.version,
            self.inputs,
            self.options,
            sorted((self.tools or {}).items()),
            target,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Stored(Generic[A]):
    """An artifact's value, and how it came about."""

    value: A
    provenance: Provenance
    digest: str  # the key's
    reused: bool


class Store:
    """All artifacts of one user. Safe for many processes at once."""

    def __init__(
        self,
        root: Path,
        on_wait: Callable[[str], None] = lambda text: None,
        shared: Path | None = None,
    ) -> None:
        self.root, self.shared = root, shared
        self._on_wait = on_wait
        try:
            for folder in ("artifacts", "locks", "tmp"):
                (root / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in DISK_FAULTS:  # the caller knows what to say of a full disk
                raise
            raise StoreError(
                f"cannot use '{root}' as the store: {error.strerror}",
                "set CRUCIBLE_HOME to a folder you can write",
            ) from error
        self.notes: list[Note] = []
        # artifacts for as long as this store is open, by digest
        self._passing: dict[str, Path] = {}

    def find(self, key: Key, kind: type[A]) -> Stored[A] | None:
        """The artifact of this key if it is there and intact, else that of the shared store."""
        kept = (
            _folder(root, key.stage, key.digest)
            for root in (self.root, self.shared)
            if root is not None
        )
        for folder in (self._passing.get(key.digest), *kept):
            if folder is None or not folder.exists():
                continue
            try:
                _mark_used(folder)  # before it is read: what is being used is not old
                return _read(folder, key, kind)
            except (OSError, ValueError) as error:
                note = Note(
                    stage="store",
                    text=(
                        f"{key.stage} {key.digest[:12]} was damaged and is made again:"
                        f" {damage(error)}"
                    ),
                )
                if note not in self.notes:
                    self.notes.append(note)
        return None

    def get(
        self,
        key: Key,
        kind: type[A],
        make: Callable[[Path], A],
        is_cacheable: Callable[[A], bool] = lambda value: True,
    ) -> Stored[A]:
        """The artifact of this key, made by `make(folder)` unless it is there. Failures are never
        kept, and values that do not last only for as long as this store is open.
        """
        if (found := self.find(key, kind)) is not None:
            return found
        with self._lock(key.stage, key.digest):
            if (found := self.find(key, kind)) is not None:
                return found
            work = self.root / "tmp" / key.digest
            try:
                for left in (
                    work,
                    _damaged(work),
                ):  # by a process that was killed while it held this lock
                    shutil.rmtree(left, ignore_errors=True)
                work.mkdir()
                started = time.perf_counter()
                value = make(work)
                provenance = _provenance(key, time.perf_counter() - started)
                write_manifest(work, value, provenance)
                final = _folder(self.root, key.stage, key.digest)
                self._publish(work, final if is_cacheable(value) else self._passing_folder(final))
            except BaseException as error:
                full = _may_be_disk(error) and shutil.disk_usage(self.root).free < MIN_FREE_BYTES
                shutil.rmtree(work, ignore_errors=True)
                if full:
                    raise DiskFull(
                        f"the disk of the store '{self.root}' is full: {first_line(error)}",
                        MORE_DISK,
                    ) from error
                raise
        published = self.find(key, kind)
        if published is None:
            raise StoreError(
                f"{key.stage} {key.digest[:12]} was published but cannot be read back",
                "check the disk of CRUCIBLE_HOME",
            )
        return Stored(published.value, published.provenance, published.digest, reused=False)

    def adopt(self, other: Path) -> tuple[str, ...]:
        """Move every artifact of another store, on the same disk and used by nobody, into this one.
        Returns why some were not taken.

        Nothing there is believed: the key must be that of the provenance, and the files those of
        the manifest, with their digests.
        """
        refused = []
        for folder in sorted((other / "artifacts").glob("*/*")):
            stage, digest = folder.parts[-2:]
            if PASSING in digest:
                continue
            final = _folder(self.root, stage, digest)
            try:
                _check_key(check_files(folder, other / "artifacts").provenance, folder)
            except (OSError, ValueError) as error:
                refused.append(f"{stage} {digest[:12]}: {damage(error)}")
                continue
            with self._lock(stage, digest):
                if not final.exists():
                    self._publish(folder, final)
        return tuple(refused)

    def artifacts(self) -> Iterator[tuple[Path, float]]:
        """Each artifact's folder, and when it was last used, in seconds since 1970."""
        for folder in sorted((self.root / "artifacts").glob("*/*")):
            with contextlib.suppress(FileNotFoundError):
                yield folder, _last_used(folder)

    def remove(self, folder: Path, used_s: float) -> bool:
        """Remove an artifact, unless it is used or made again since `used_s`; whether it was."""
        stage, digest = folder.parts[-2:]
        with self._lock(stage, digest):
            if (
                not folder.exists() or _last_used(folder) > used_s + 1e-3
            ):  # less is lost between clocks and floats
                return False
            gone = self.root / "tmp" / digest
            shutil.rmtree(gone, ignore_errors=True)
            folder.rename(gone)
            shutil.rmtree(gone)
        return True

    def _passing_folder(self, final: Path) -> Path:
        """A place that no other process looks at, removed at the end of this one; of one that was
        killed it ages like any artifact.
        """
        folder = self._passing[final.name] = final.with_name(
            f"{final.name}{PASSING}{uuid.uuid4().hex}"
        )
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    @contextlib.contextmanager
    def _lock(self, stage: str, digest: str) -> Iterator[None]:
        lock = FileLock(self.root / "locks" / f"{digest}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self._on_wait(f"another process is making {stage}; waiting for it")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _publish(self, work: Path, final: Path) -> None:
        for file in work.rglob("*"):
            if file.is_file():
                sync(file)
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.exists():  # damaged: find() said so
            final.rename(_damaged(work))
            shutil.rmtree(_damaged(work), ignore_errors=True)
        work.rename(final)
        sync(final.parent)


def canonical(options: BaseModel | Mapping[str, object]) -> str:
    """JSON with sorted keys: the same options always give the same text."""
    data = options.model_dump(mode="json") if isinstance(options, BaseModel) else options
    return json.dumps(data, sort_keys=True, default=str)


class Manifest(Frozen):
    """What artifact.json holds."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # else NaN would come back as None

    value: dict[str, Any]
    provenance: Provenance
    files: dict[str, str]  # sha256 by path
    sha256: str = ""  # of the other three, so that a number changed in here is found too

    def sealed(self) -> Manifest:
        """This manifest with its digest."""
        text = json.dumps(self.model_dump(mode="json", exclude={"sha256"}), sort_keys=True)
        return self.model_copy(update={"sha256": hashlib.sha256(text.encode()).hexdigest()})


def check_files(folder: Path, within: Path, besides: tuple[str, ...] = ()) -> Manifest:
    """The manifest of an artifact's folder that a stranger made; ValueError unless it lies in
    `within`, and holds exactly the plain files that the manifest lists, with their digests, and
    those named `besides`.
    """
    if folder.resolve() != within.resolve() / folder.relative_to(within):
        raise ValueError("a link stands in the place of a folder")
    for path in folder.rglob("*"):
        about = path.lstat()
        if not stat.S_ISDIR(about.st_mode) and (
            not stat.S_ISREG(about.st_mode) or about.st_nlink > 1
        ):
            raise ValueError(f"'{path.name}' is not a plain file")
    return check_manifest(folder, besides)


def _check_key(made: Provenance, folder: Path) -> None:
    key = Key(made.stage, made.stage_version, made.inputs, made.options, made.tools, made.target)
    if (key.stage, key.digest) != folder.parts[-2:]:
        raise ValueError("it lies under another key than that of its provenance")


def _mark_used(folder: Path) -> None:
    """A store that cannot be written is used all the same."""
    with contextlib.suppress(OSError):
        os.utime(folder / MANIFEST)


def _last_used(folder: Path) -> float:
    manifest = folder / MANIFEST
    # one without is damaged, and as old as that is
    return (manifest if manifest.exists() else folder).stat().st_mtime


def _folder(root: Path, stage: str, digest: str) -> Path:
    return root / "artifacts" / stage / digest


def _read(folder: Path, key: Key, kind: type[A]) -> Stored[A]:
    """The artifact in `folder`; OSError or ValueError unless everything there is as it was written,
    and nothing else is.
    """
    manifest = check_manifest(folder)
    value = kind.model_validate(
        {**manifest.value, "root": folder} if issubclass(kind, Artifact) else manifest.value
    )
    return Stored(value, manifest.provenance, key.digest, reused=True)


def check_manifest(folder: Path, besides: tuple[str, ...] = ()) -> Manifest:
    """The manifest, checked against itself and against all files there but those named
    `besides`.
    """
    manifest = read_manifest(folder)
    check_digests(folder, manifest.files, (MANIFEST, *besides))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest, checked against itself only; ValueError if that does not hold."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"'{MANIFEST}' is missing")
    manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    sealed = manifest.sealed()
    if sealed.sha256 != manifest.sha256:
        raise ValueError(_changed(MANIFEST, manifest.sha256, sealed.sha256))
    return manifest


def digests_of(folder: Path, besides: Collection[str] = ()) -> dict[str, str]:
    """Return the sha256 of every file in `folder` by its path there, but of those `besides`."""
    names = sorted(_files(folder) - set(besides))
    return {name: digest_of(folder / name) for name in names}


def check_digests(folder: Path, files: Mapping[str, str], besides: Collection[str] = ()) -> None:
    """Raise ValueError with the first file that is missing, was added or has another sha256.

    `files` maps the path of each expected file to its sha256. Files `besides` are not looked at.
    """
    there = _files(folder) - set(besides)
    if missing := sorted(set(files) - there):
        raise ValueError(f"'{missing[0]}' is missing")
    if added := sorted(there - set(files)):
        raise ValueError(f"'{added[0]}' was added")
    for name, expected in files.items():
        check_digest(folder, name, expected)


def check_digest(folder: Path, name: str, expected: str) -> None:
    """Raise ValueError unless the file of this name in `folder` has this sha256."""
    if (actual := digest_of(folder / name)) != expected:
        raise ValueError(_changed(name, expected, actual))


def _changed(name: str, expected: str, actual: str) -> str:
    start = f"'{name}' has another digest than when it was written"
    return f"{start}: expected sha256 {expected[:DIGITS]}…, got {actual[:DIGITS]}…"


def damage(error: OSError | ValueError) -> str:
    """What is wrong with an artifact, in one line."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return " ".join([f"'{MANIFEST}'", *map(str, first["loc"]), first["msg"]])


def write_manifest(
    folder: Path,
    value: BaseModel,
    provenance: Provenance,
    besides: Collection[str] = (),
) -> None:
    """Write what is in `folder`, with the sha256 of every file but those `besides`."""
    files, content = digests_of(folder, (MANIFEST, *besides)), value.model_dump(mode="json")
    manifest = Manifest(value=content, provenance=provenance, files=files).sealed()
    (folder / MANIFEST).write_text(
        json.dumps(manifest.model_dump(mode="json"), indent=1), encoding="utf-8"
    )


def _files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir()}


def _damaged(work: Path) -> Path:
    return work.with_name(f"{work.name}.damaged")


def _may_be_disk(error: BaseException) -> bool:
    """Return whether a full disk explains an error that does not say why it came.

    So a child's death, and what a library raised. A plan's fault, or a library that is missing,
    stays what it is.
    """
    if isinstance(error, CrucibleError):
        return isinstance(error, InternalError | ChildDied | StoreError)
    return isinstance(error, Exception)


def _provenance(key: Key, seconds: float) -> Provenance:
    return Provenance(
        stage=key.stage,
        stage_version=key.version,
        inputs=key.inputs,
        options=key.options,
        tools=dict(key.tools or {}),
        target=key.target,
        created=now(),
        seconds=seconds,
    )


def now() -> str:
    """Return the date and time, for the reader: UTC in ISO 8601."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def digest_of(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have a file, or the entries of a folder, written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
