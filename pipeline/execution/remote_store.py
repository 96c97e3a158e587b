"""Artifacts in S3, shared by hosts: `CRUCIBLE_STORE=s3://bucket/prefix`.

    <prefix>/blobs/<sha256>               the files, by their content
    <prefix>/manifests/<stage>/<key>      artifact.json

An artifact's files are uploaded first and its manifest last, so that a killed upload leaves nothing
that is read. Nothing depends on conditional writes: a file is named by its content, and of two
manifests of one key either is right. What comes back is not trusted: the names must stay in the
folder, the key must match the provenance, and the caller compares each file with its sha256.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from pipeline.errors import PlanError
from pipeline.execution.object_store import WAIT_S, ObjectStore
from pipeline.execution.store import (
    MANIFEST,
    BuildLock,
    Store,
    check_key,
    manifest_from,
    read_manifest,
)
from pipeline.plan.files import home

DEFAULT_CACHE_BYTES = 100 * 2**30
MANIFESTS, BLOBS = "manifests/", "blobs/"
READS_AT_ONCE = 8
SHA256 = re.compile(r"[0-9a-f]{64}")


class RemoteStore(ObjectStore):
    """The artifacts below one URL. Safe for many threads and hosts at once.

    Every method raises StoreError if the store is away for `wait_s` seconds, or refuses.
    """

    def __init__(self, url: str, wait_s: float = WAIT_S, setting: str = "CRUCIBLE_STORE") -> None:
        super().__init__(url, setting, wait_s)

    def fetch(self, stage: str, digest: str, folder: Path) -> bool:
        """Copy the artifact of this key into the empty `folder`. False if there is none.

        The caller compares the files with the manifest. ValueError names what is damaged here.
        """
        try:
            content = self.get(_manifest(stage, digest))
        except FileNotFoundError:
            return False
        manifest = manifest_from(content)
        check_key(manifest.provenance, stage, digest)
        for name, sha256 in manifest.files.items():
            _check_name(name, sha256)
        for name, sha256 in manifest.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with target.open("wb") as file:
                    for chunk in self.chunks(_blob(sha256)):
                        file.write(chunk)
            except FileNotFoundError as error:
                raise ValueError(f"'{name}' is missing in '{self.url}'") from error
        (folder / MANIFEST).write_bytes(content)
        return True

    def push(self, folder: Path) -> None:
        """Upload the artifact in `folder`: its files, then its manifest.

        Files are uploaded although they may be there already: those might be damaged.
        """
        stage, digest = folder.parts[-2:]
        for name, sha256 in read_manifest(folder).files.items():
            self.put_file(folder / name, _blob(sha256))
        self.put((folder / MANIFEST).read_bytes(), _manifest(stage, digest))

    def collect(
        self, before: dt.datetime, used: Collection[tuple[str, str]], dry_run: bool = False
    ) -> tuple[int, int]:
        """Remove the artifacts written before a moment, except the `used` ones, and then the old
        files that no artifact names. Returns the number of artifacts and the bytes of all.

        `used`: stages and keys. Nobody may push meanwhile.
        """
        found = tuple(self.objects())
        old = [each for each in found if each.written < before]
        manifests = {each.name for each in found if each.name.startswith(MANIFESTS)}
        gone = [each for each in old if each.name in manifests and not _is_of(each.name, used)]
        named = self._blobs_of(manifests - {each.name for each in gone})
        unnamed = [each for each in old if each.name.startswith(BLOBS) and each.name not in named]
        if not dry_run:
            self.remove(each.name for each in gone)  # first: so that no artifact lacks a file
            self.remove(each.name for each in unnamed)
        return len(gone), sum(each.size_bytes for each in (*gone, *unnamed))

    def _blobs_of(self, manifests: Collection[str]) -> set[str]:
        """Return the names of all files of these artifacts; of a damaged one, none."""
        named = set[str]()
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            for content in pool.map(self.get, manifests):
                with contextlib.suppress(ValueError):
                    named |= {_blob(sha256) for sha256 in manifest_from(content).files.values()}
        return named

    def size(self) -> tuple[int, int]:
        """Return the number of artifacts and the bytes of all files."""
        found = tuple(self.objects())
        manifests = [each for each in found if each.name.startswith(MANIFESTS)]
        return len(manifests), sum(each.size_bytes for each in found)


def open_store(
    on_wait: Callable[[str], None] = lambda text: None,
    build_lock: BuildLock | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Store:
    """Open the store of this user: local, or as the cache of the one that CRUCIBLE_STORE names."""
    url = environ.get("CRUCIBLE_STORE", "")
    if not url:
        return Store(home(), on_wait)
    text = environ.get("CRUCIBLE_STORE_CACHE_BYTES") or str(DEFAULT_CACHE_BYTES)
    if not (text.isascii() and text.isdigit()):
        raise PlanError(
            f"expected CRUCIBLE_STORE_CACHE_BYTES as a number of bytes, got '{text}'",
            "write it like 100000000000",
        )
    return Store(
        home(), on_wait, remote=RemoteStore(url), build_lock=build_lock, cache_bytes=int(text)
    )


def _manifest(stage: str, digest: str) -> str:
    return f"{MANIFESTS}{stage}/{digest}"


def _is_of(manifest: str, keys: Collection[tuple[str, str]]) -> bool:
    stage, _, digest = manifest.removeprefix(MANIFESTS).rpartition("/")
    return (stage, digest) in keys


def _blob(sha256: str) -> str:
    return f"{BLOBS}{sha256}"


def _check_name(name: str, sha256: str) -> None:
    """Raise ValueError unless a file of a manifest from elsewhere stays in its folder."""
    path = PurePosixPath(name)
    if (
        not path.parts
        or path.is_absolute()
        or ".." in path.parts
        or str(path) != name
        or "\0" in name
        or name == MANIFEST
    ):
        raise ValueError(f"'{name}' is no name of a file in an artifact")
    if not SHA256.fullmatch(sha256):
        raise ValueError(f"'{name}' has no sha256")
