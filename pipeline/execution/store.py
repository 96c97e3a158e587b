"""The content-addressed store: each artifact is made once and found again by its inputs.
    <root>/artifacts/<stage>/<key>/     the files of one artifact, and artifact.json (value,
                                        provenance, sha256 of each file and of the manifest)
    <root>/locks/<key>.lock             held while an artifact is made
    <root>/tmp/<key>/                   work folder; renamed into place when complete

`Store.get` looks, locks, looks again, makes the artifact and publishes it by one rename. A killed
process leaves at most a folder under tmp/, which the next holder of the same lock removes. Finding
an artifact sets the modification time of its manifest, which is the time of its last use.

A store can read through to a second, `shared` store. It never writes there, except for the
last-used times. Jobs of the service use this: the shared store adopts their artifacts after the
job has job has ended (`Store.adopt`).

With a `remote` store this one is its cache. An artifact that is missing here is fetched and
checked, and one that was made here is pushed. `unpushed/` names those that still have to be. Above
`cache_bytes` the least recently used go, except those that an open store has found.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, TypeVar

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.core.artifacts import Artifact, Note, Provenance, Target
from pipeline.core.frozen import Frozen
from pipeline.errors import ChildDied, CrucibleError, DiskFull, InternalError, StoreError
from pipeline.execution.exit_causes import DISK_FAULTS, MORE_DISK, first_line

if TYPE_CHECKING:
    from pipeline.execution.remote_store import RemoteStore

A = TypeVar("A", bound=BaseModel)

MANIFEST = "artifact.json"
TRANSIENT = ".passing-"  # in the folder name of an artifact that is not cached, after the digest
LAYOUT = 2  # of this folder; raised when older artifacts become unreadable
DIGITS = 16  # digits of a sha256 in a message
# a disk with less free space counts as full: a library's failed write does not always say why
MIN_FREE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Key:
    """The inputs of an artifact. Equal keys mean equal artifacts."""

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


BuildLock = Callable[[Key], AbstractContextManager[object]]
"""Held by one of all hosts while it makes the artifact of a key."""


@dataclass(frozen=True, slots=True)
class Stored(Generic[A]):
    """An artifact's value and its provenance."""

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
        remote: RemoteStore | None = None,
        build_lock: BuildLock | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        """Open the store in `root`. Without `build_lock`, two hosts may make the same artifact."""
        self.root, self.shared, self.remote = root, shared, remote
        self._on_wait, self._build_lock, self._cache_bytes = on_wait, build_lock, cache_bytes
        # files locked while this store is open, by digest: an artifact in use is not evicted
        self._uses: dict[str, IO[bytes]] = {}
        try:
            for folder in ("artifacts", "locks", "tmp", *(("unpushed",) if remote else ())):
                (root / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in DISK_FAULTS:  # the caller reports a full disk
                raise
            raise StoreError(
                f"cannot use '{root}' as the store: {error.strerror}",
                "set CRUCIBLE_HOME to a folder you can write",
            ) from error
        self.notes: list[Note] = []
        # folders of artifacts that exist only while this store is open, by digest
        self._transient: dict[str, Path] = {}

    def find(self, key: Key, kind: type[A]) -> Stored[A] | None:
        """Return the artifact of this key if it is intact here, else from the shared store.

        None if neither has it. A damaged artifact adds a note.
        """
        if self._cache_bytes is not None:
            self._hold(key.digest)
        cached = (
            _folder(root, key.stage, key.digest)
            for root in (self.root, self.shared)
            if root is not None
        )
        for folder in (self._transient.get(key.digest), *cached):
            if folder is None or not folder.exists():
                continue
            try:
                _mark_used(folder)  # before the read, so that retention does not remove it now
                return _read(folder, key, kind)
            except (OSError, ValueError) as error:
                self._note(
                    f"{key.stage} {key.digest[:12]} was damaged and is made again: {damage(error)}"
                )
        return None

    def get(
        self,
        key: Key,
        kind: type[A],
        make: Callable[[Path], A],
        is_cacheable: Callable[[A], bool] = lambda value: True,
    ) -> Stored[A]:
        """Return the artifact of this key. If it is missing, `make(folder)` makes it.

        Failures are never cached. A value that is not cacheable exists only while this store is
        open. DiskFull if the artifact cannot be made because the disk is full.
        """
        stored = self.find(key, kind)
        if stored is not None:
            return stored
        self.push_pending()
        with self._lock(key.stage, key.digest):
            # again: another process may have made it meanwhile
            stored = self.find(key, kind) or self._fetch(key, kind)
            if stored is None:
                with self._build_lock(key) if self._build_lock else contextlib.nullcontext():
                    if self._build_lock:  # again: another host may have made it meanwhile
                        stored = self.find(key, kind) or self._fetch(key, kind)
                    stored = stored or self._make(key, kind, make, is_cacheable)
        self._shrink()
        return stored

    def _make(
        self,
        key: Key,
        kind: type[A],
        make: Callable[[Path], A],
        is_cacheable: Callable[[A], bool],
    ) -> Stored[A]:
        """Make an artifact, publish it and push it. The caller holds the locks of the key."""
        with self._work_folder(key.digest) as work:
            started = time.perf_counter()
            value = make(work)
            write_manifest(work, value, _provenance(key, time.perf_counter() - started))
            final = _folder(self.root, key.stage, key.digest)
            is_kept = is_cacheable(value)
            self._publish(work, final if is_kept else self._transient_folder(final))
        published = self.find(key, kind)
        if published is None:
            raise StoreError(
                f"{key.stage} {key.digest[:12]} was published but cannot be read back",
                "check the disk of CRUCIBLE_HOME",
            )
        if self.remote and is_kept:
            self._pending(final).touch()  # before the upload, which may be killed
            try:
                self._push(self.remote, final)
            except StoreError as error:  # the result is here, and the next use pushes it
                self._note(f"{key.stage} {key.digest[:12]} is not shared yet: {error.message}")
        return replace(published, reused=False)

    # -- as the cache of a remote store ----------------------------------------------------------

    def _fetch(self, key: Key, kind: type[A]) -> Stored[A] | None:
        """Copy an artifact from the remote store, and check it. None if it has none intact."""
        return self.find(key, kind) if self._copy_remote(key.stage, key.digest) else None

    def _copy_remote(self, stage: str, digest: str) -> bool:
        if self.remote is None:
            return False
        with self._work_folder(digest) as work:
            try:
                if not self.remote.fetch(stage, digest, work):
                    work.rmdir()
                    return False
                check_manifest(work)
            except ValueError as error:
                shutil.rmtree(work)
                self._note(
                    f"{stage} {digest[:12]} is damaged in '{self.remote.url}' and is made"
                    f" again: {damage(error)}"
                )
                return False
            self._publish(work, _folder(self.root, stage, digest))
        return True

    def bring(self, stage: str, digest: str) -> bool:
        """Return whether an intact artifact is here, or could be copied from the remote store."""
        folder = _folder(self.root, stage, digest)
        with self._lock(stage, digest):
            if folder.exists():
                with contextlib.suppress(OSError, ValueError):
                    check_manifest(folder)
                    _mark_used(folder)
                    return True
            return self._copy_remote(stage, digest)

    def push_pending(self) -> None:
        """Push what was made and not pushed yet, unless another process works on it."""
        if self.remote is None:
            return
        for marker in sorted((self.root / "unpushed").iterdir()):
            stage, _, digest = marker.name.rpartition("-")
            folder = _folder(self.root, stage, digest)
            with contextlib.suppress(Timeout), self._file_lock(digest).acquire(timeout=0):
                try:
                    check_manifest(folder)
                except (OSError, ValueError):  # it is made again when it is needed
                    marker.unlink(missing_ok=True)
                    continue
                self._push(self.remote, folder)

    def _push(self, remote: RemoteStore, folder: Path) -> None:
        remote.push(folder)
        self._pending(folder).unlink(missing_ok=True)

    def _pending(self, folder: Path) -> Path:
        return self.root / "unpushed" / "-".join(folder.parts[-2:])

    def _hold(self, digest: str) -> None:
        """Keep an artifact from eviction until this store is closed, or its process ends."""
        if digest not in self._uses:
            file = self._use_file(digest)
            fcntl.flock(file, fcntl.LOCK_SH)
            if self._uses.setdefault(digest, file) is not file:  # another thread was first
                file.close()
            else:
                weakref.finalize(self, file.close)

    def _use_file(self, digest: str) -> IO[bytes]:
        return (self.root / "locks" / f"{digest}.use").open("ab")

    def _shrink(self) -> None:
        """Remove the least recently used artifacts above the limit of the cache.

        What is in use, or not pushed yet, stays, even above the limit.
        """
        if self._cache_bytes is None:
            return
        found = sorted(self.artifacts(), key=lambda item: item[1])
        sizes = {folder: bytes_of(folder) for folder, _ in found}
        excess = sum(sizes.values()) - self._cache_bytes
        for folder, _ in found:
            if excess > 0 and not self._pending(folder).exists() and self._evict(folder):
                excess -= sizes[folder]

    def _evict(self, folder: Path) -> bool:
        """Remove an artifact unless a process makes or uses it. Returns whether it was removed."""
        digest = folder.name
        with (
            contextlib.suppress(Timeout, BlockingIOError),
            self._file_lock(digest).acquire(timeout=0),
            self._use_file(digest) as file,
        ):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove(folder)
            return True
        return False

    def _note(self, text: str) -> None:
        note = Note(stage="store", text=text)
        if note not in self.notes:
            self.notes.append(note)

    @contextlib.contextmanager
    def _work_folder(self, digest: str) -> Iterator[Path]:
        """Yield an empty folder for the artifact of a key, and remove it after an error.

        The caller holds the lock of the key. DiskFull if a full disk may be the cause of the error.
        """
        work = self.root / "tmp" / digest
        # leftovers of a process that was killed while it held this lock
        for leftover in (work, _damaged(work)):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            work.mkdir()
            yield work
        except BaseException as error:
            # before the cleanup, which frees some space
            is_full = _may_be_disk(error) and self._free_bytes() < MIN_FREE_BYTES
            shutil.rmtree(work, ignore_errors=True)
            if is_full:
                raise DiskFull(
                    f"the disk of the store '{self.root}' is full: {first_line(error)}",
                    MORE_DISK,
                ) from error
            raise

    def adopt(self, other: Path) -> tuple[str, ...]:
        """Move every artifact of another store into this one. Returns the reasons of refusals.

        The other store must lie on the same disk, and no process may use it. Its content is not
        trusted: the key must match the provenance, and the files must match the manifest.
        """
        refusals = []
        for folder in sorted((other / "artifacts").glob("*/*")):
            stage, digest = folder.parts[-2:]
            if TRANSIENT in digest:
                continue
            final = _folder(self.root, stage, digest)
            try:
                check_key(check_files(folder, other / "artifacts").provenance, stage, digest)
            except (OSError, ValueError) as error:
                refusals.append(f"{stage} {digest[:12]}: {damage(error)}")
                continue
            with self._lock(stage, digest):
                if not final.exists():
                    self._publish(folder, final)
                    if self.remote is not None:
                        self._pending(final).touch()
        return tuple(refusals)

    def adopt_copy(self, folder: Path) -> None:
        """Copy an artifact of another store into this one, and push it. A process may use the other
        store, and even change it meanwhile: the copy is checked, as `adopt` does.

        ValueError or OSError if the copy is not intact.
        """
        stage, digest = folder.parts[-2:]
        final = _folder(self.root, stage, digest)
        with self._lock(stage, digest):
            if not final.exists():
                with self._work_folder(digest) as work:
                    _copy_plain_files(folder, work)
                    check_key(check_files(work, work.parent).provenance, stage, digest)
                    self._publish(work, final)
            if self.remote is not None:
                self._pending(final).touch()
                self._push(self.remote, final)

    def artifacts(self) -> Iterator[tuple[Path, float]]:
        """Yield each artifact's folder, and the time of its last use in seconds since 1970."""
        for folder in sorted((self.root / "artifacts").glob("*/*")):
            with contextlib.suppress(FileNotFoundError):
                yield folder, _last_used(folder)

    def remove(self, folder: Path, used_s: float) -> bool:
        """Remove an artifact that was not used since `used_s`. Returns whether it was removed."""
        stage, digest = folder.parts[-2:]
        with self._lock(stage, digest):
            # 1 ms covers the rounding between clock and float
            if not folder.exists() or _last_used(folder) > used_s + 1e-3:
                return False
            self._remove(folder)
        return True

    def _remove(self, folder: Path) -> None:
        work = self.root / "tmp" / folder.name
        shutil.rmtree(work, ignore_errors=True)
        folder.rename(work)
        shutil.rmtree(work)

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.root).free

    def _transient_folder(self, final: Path) -> Path:
        """Return a folder that no other process reads, and remove it when this process ends.

        After a kill it remains, and retention removes it like any old artifact.
        """
        folder = final.with_name(f"{final.name}{TRANSIENT}{uuid.uuid4().hex}")
        self._transient[final.name] = folder
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    @contextlib.contextmanager
    def _lock(self, stage: str, digest: str) -> Iterator[None]:
        lock = self._file_lock(digest)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self._on_wait(f"another process is making {stage}; waiting for it")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _file_lock(self, digest: str) -> FileLock:
        return FileLock(self.root / "locks" / f"{digest}.lock")

    def _publish(self, work: Path, final: Path) -> None:
        for file in work.rglob("*"):
            if file.is_file():
                sync(file)
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.exists():  # find() has found it damaged
            final.rename(_damaged(work))
            shutil.rmtree(_damaged(work), ignore_errors=True)
        work.rename(final)
        sync(final.parent)


def canonical(options: BaseModel | Mapping[str, object]) -> str:
    """Return options as JSON with sorted keys: equal options give equal texts."""
    data = options.model_dump(mode="json") if isinstance(options, BaseModel) else options
    return json.dumps(data, sort_keys=True, default=str)


class Manifest(Frozen):
    """The content of artifact.json."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # else NaN would come back as None

    value: dict[str, Any]
    provenance: Provenance
    files: dict[str, str]  # sha256 by path
    sha256: str = ""  # of the other three fields, which detects a change in this file

    def sealed(self) -> Manifest:
        """Return this manifest with its digest."""
        text = json.dumps(self.model_dump(mode="json", exclude={"sha256"}), sort_keys=True)
        return self.model_copy(update={"sha256": hashlib.sha256(text.encode()).hexdigest()})


def check_files(folder: Path, within: Path, besides: tuple[str, ...] = ()) -> Manifest:
    """Check an untrusted artifact folder and return its manifest.

    ValueError unless the folder lies in `within` and holds exactly the plain files of the
    manifest, with their digests, and those named `besides`.
    """
    if folder.resolve() != within.resolve() / folder.relative_to(within):
        raise ValueError("a link stands in the place of a folder")
    for path in folder.rglob("*"):
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            continue
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise ValueError(f"'{path.name}' is not a plain file")
    return check_manifest(folder, besides)


def check_key(provenance: Provenance, stage: str, digest: str) -> None:
    """Raise ValueError unless this is the key of the provenance."""
    key = Key(
        stage=provenance.stage,
        version=provenance.stage_version,
        inputs=provenance.inputs,
        options=provenance.options,
        tools=provenance.tools,
        target=provenance.target,
    )
    if (key.stage, key.digest) != (stage, digest):
        raise ValueError("it lies under another key than that of its provenance")


def _mark_used(folder: Path) -> None:
    """Set the last-used time. A read-only store is used without it."""
    with contextlib.suppress(OSError):
        os.utime(folder / MANIFEST)


def _last_used(folder: Path) -> float:
    manifest = folder / MANIFEST
    # a folder without a manifest is damaged; its own time counts
    return (manifest if manifest.exists() else folder).stat().st_mtime


def _folder(root: Path, stage: str, digest: str) -> Path:
    return root / "artifacts" / stage / digest


def _read(folder: Path, key: Key, kind: type[A]) -> Stored[A]:
    """Read the artifact in `folder`. OSError or ValueError if a file changed or was added."""
    manifest = check_manifest(folder)
    fields = manifest.value
    if issubclass(kind, Artifact):
        fields = {**fields, "root": folder}
    return Stored(kind.model_validate(fields), manifest.provenance, key.digest, reused=True)


def check_manifest(folder: Path, besides: tuple[str, ...] = ()) -> Manifest:
    """Read the manifest and check its own digest and that of every file not in `besides`."""
    manifest = read_manifest(folder)
    check_digests(folder, manifest.files, (MANIFEST, *besides))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest and check its own digest. ValueError if it does not match."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"'{MANIFEST}' is missing")
    return manifest_from((folder / MANIFEST).read_bytes())


def manifest_from(content: bytes) -> Manifest:
    """Parse a manifest and check its own digest. ValueError if it does not match."""
    manifest = Manifest.model_validate_json(content)
    sealed = manifest.sealed()
    if sealed.sha256 != manifest.sha256:
        raise ValueError(_changed(MANIFEST, manifest.sha256, sealed.sha256))
    return manifest


def digests_of(folder: Path, besides: Collection[str] = ()) -> dict[str, str]:
    """Return the sha256 of every file in `folder` by its relative path, without `besides`."""
    names = sorted(_files(folder) - set(besides))
    return {name: digest_of(folder / name) for name in names}


def check_digests(folder: Path, files: Mapping[str, str], besides: Collection[str] = ()) -> None:
    """Raise ValueError with the first file that is missing, was added or has another sha256.

    `files` maps the path of each expected file to its sha256. Files in `besides` are ignored.
    """
    present = _files(folder) - set(besides)
    if missing := sorted(set(files) - present):
        raise ValueError(f"'{missing[0]}' is missing")
    if added := sorted(present - set(files)):
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
    """Describe the damage of an artifact in one line."""
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
    """Write the manifest of `folder`, with the sha256 of every file not in `besides`."""
    files, content = digests_of(folder, (MANIFEST, *besides)), value.model_dump(mode="json")
    manifest = Manifest(value=content, provenance=provenance, files=files).sealed()
    (folder / MANIFEST).write_text(
        json.dumps(manifest.model_dump(mode="json"), indent=1), encoding="utf-8"
    )


def _files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir()}


def bytes_of(folder: Path) -> int:
    """Return the size of all files in `folder`. A file that is removed meanwhile counts nothing."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += file.lstat().st_size if file.is_file() else 0
    return total


def _copy_plain_files(source: Path, target: Path) -> None:
    """Copy the files of a folder. Links are not followed, at no time; OSError names one."""
    for parent, _, names, descriptor in os.fwalk(source, follow_symlinks=False):
        place = target / Path(parent).relative_to(source)
        place.mkdir(exist_ok=True)
        for name in names:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(name, flags, dir_fd=descriptor), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError(f"'{name}' is not a plain file")
                with (place / name).open("wb") as copy:
                    shutil.copyfileobj(file, copy)


def _damaged(work: Path) -> Path:
    return work.with_name(f"{work.name}.damaged")


def _may_be_disk(error: BaseException) -> bool:
    """Return whether a full disk may be the cause of an error.

    True for the death of a child and for an error of a library. False for an error in the plan or
    a missing library.
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
    """Return the date and time for readers: UTC in ISO 8601."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def digest_of(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Write a file, or the entries of a folder, through to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
