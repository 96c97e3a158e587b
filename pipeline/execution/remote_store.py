"""Artifacts in S3, shared by hosts: `CRUCIBLE_STORE=s3://bucket/prefix`.

    <prefix>/blobs/<sha256>               the files, by their content
    <prefix>/manifests/<stage>/<key>      artifact.json

An artifact's files are uploaded first and its manifest last, so that a killed upload leaves nothing
that is read. Nothing depends on conditional writes: a file is named by its content, and of two
manifests of one key either is right. What comes back is not trusted: the names must stay in the
folder, the key must match the provenance, and the caller compares each file with its sha256.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.errors import BackendUnavailable, PlanError, StoreError
from pipeline.execution.store import MANIFEST, Store, check_key, manifest_from, read_manifest
from pipeline.plan.files import home

SCHEME = "s3://"
WAIT_S = 60.0  # for a remote store that is away
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 8.0
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5, 30
CHUNK_BYTES = 16 * 2**20  # of one read
DEFAULT_CACHE_BYTES = 100 * 2**30
AWAY = (errno.EIO, errno.EBUSY, errno.ETIMEDOUT)  # how s3fs reports a fault of the server
SHA256 = re.compile(r"[0-9a-f]{64}")


class RemoteStore:
    """The artifacts below one URL. Safe for many threads and hosts at once.

    Every method raises StoreError if the store is away for `wait_s` seconds, or refuses.
    """

    def __init__(self, url: str, wait_s: float = WAIT_S) -> None:
        self._root = url.removeprefix(SCHEME).strip("/")
        self.url = f"{SCHEME}{self._root}"
        bucket = self._root.partition("/")[0]
        if not url.startswith(SCHEME) or not bucket:
            raise PlanError(
                f"expected CRUCIBLE_STORE=s3://bucket/prefix, got '{url}'",
                "give the bucket and the prefix, or unset CRUCIBLE_STORE",
            )
        try:
            s3fs = importlib.import_module("s3fs")
            self._exceptions = importlib.import_module("botocore.exceptions")
        except ImportError as error:
            raise BackendUnavailable(
                f"'{url}' needs the extra `s3`, which is not installed", "pip install -e '.[s3]'"
            ) from error
        self._unreachable = (
            *s3fs.core.S3_RETRYABLE_ERRORS,
            self._exceptions.HTTPClientError,
            self._exceptions.ConnectionError,
        )
        self._wait_s = wait_s
        self._fs = s3fs.S3FileSystem(
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={
                "connect_timeout": CONNECT_TIMEOUT_S,
                "read_timeout": READ_TIMEOUT_S,
                "retries": {"total_max_attempts": 1},  # `_call` repeats
            },
        )
        self._fs.retries = 1

    def fetch(self, stage: str, digest: str, folder: Path) -> bool:
        """Copy the artifact of this key into the empty `folder`. False if there is none.

        The caller compares the files with the manifest. ValueError names what is damaged here.
        """
        try:
            content = self._call(self._fs.cat_file, self._manifest(stage, digest))
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
                    for chunk in self._read(self._blob(sha256)):
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
            self._call(self._fs.put_file, str(folder / name), self._blob(sha256))
        content = (folder / MANIFEST).read_bytes()
        self._call(self._fs.pipe_file, self._manifest(stage, digest), content)

    def size(self) -> tuple[int, int]:
        """Return the number of artifacts and the bytes of all files."""
        files = self._call(self._fs.find, self._root, detail=True)
        manifests = [name for name in files if name.startswith(f"{self._root}/manifests/")]
        return len(manifests), sum(details["size"] for details in files.values())

    def _manifest(self, stage: str, digest: str) -> str:
        return f"{self._root}/manifests/{stage}/{digest}"

    def _blob(self, sha256: str) -> str:
        return f"{self._root}/blobs/{sha256}"

    def _read(self, path: str) -> Iterator[bytes]:
        size = self._call(self._fs.info, path)["size"]
        for start in range(0, size, CHUNK_BYTES):
            yield self._call(
                self._fs.cat_file, path, start=start, end=min(start + CHUNK_BYTES, size)
            )

    def _call(self, function: Callable[..., Any], *arguments: object, **options: object) -> Any:
        """Call a function of the file system; repeat it while the store is away.

        FileNotFoundError if the bucket exists but the object does not.
        """
        end_s, pause_s = time.monotonic() + self._wait_s, FIRST_PAUSE_S
        while True:
            try:
                return function(*arguments, **options)
            except Exception as error:
                if not self._is_away(error):
                    if isinstance(error, FileNotFoundError) and not _no_bucket(error):
                        raise
                    raise self._refusal(error) from error
                if time.monotonic() + pause_s > end_s:
                    raise StoreError(
                        f"no answer from the store '{self.url}' for {self._wait_s:g} s:"
                        f" {type(error).__name__}: {error}",
                        "check the network and AWS_ENDPOINT_URL and run the command again, which"
                        " continues; or unset CRUCIBLE_STORE to use only the local store",
                    ) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _is_away(self, error: Exception) -> bool:
        if isinstance(error, (*self._unreachable, ConnectionError, TimeoutError)):
            return True
        return isinstance(error, OSError) and error.errno in AWAY

    def _refusal(self, error: Exception) -> StoreError:
        if _no_bucket(error):
            return StoreError(
                f"the store '{self.url}' has no such bucket", "create it, or correct CRUCIBLE_STORE"
            )
        if isinstance(error, self._exceptions.NoCredentialsError):
            return StoreError(
                f"no credentials for the store '{self.url}'",
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
            )
        return StoreError(
            f"the store '{self.url}' refuses: {type(error).__name__}: {error}",
            "check CRUCIBLE_STORE, the credentials, and their rights to list, read and write",
        )


def open_store(
    on_wait: Callable[[str], None] = lambda text: None,
    build_lock: Callable[[str], AbstractContextManager[object]] | None = None,
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


def _no_bucket(error: BaseException) -> bool:
    response = getattr(error.__cause__, "response", None) or {}
    return bool(response.get("Error", {}).get("Code") == "NoSuchBucket")


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
