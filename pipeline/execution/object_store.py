"""Objects in S3, below one URL: calls are repeated while S3 is away, and its errors translated."""

from __future__ import annotations

import datetime as dt
import errno
import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import BackendUnavailable, ObjectStoreError, PlanError, StoreAway

SCHEME = "s3://"
WAIT_S = 60.0  # for a store that is away
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 8.0
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5, 30
CHUNK_BYTES = 16 * 2**20  # of one read
MAX_DELETED = 1000  # objects of one call, as S3 takes them
AWAY = (errno.EIO, errno.EBUSY, errno.ETIMEDOUT)  # how s3fs reports a fault of the server


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in the store."""

    name: str  # below the URL
    size_bytes: int
    written: dt.datetime  # by the clock of the store


class ObjectStore:
    """The objects below one URL. Safe for many threads and hosts at once.

    Every method raises StoreAway if the store does not answer for `wait_s` seconds, and
    ObjectStoreError if it refuses. `setting` names the variable that holds the URL.
    """

    def __init__(self, url: str, setting: str, wait_s: float = WAIT_S) -> None:
        self._root = url.removeprefix(SCHEME).strip("/")
        self.url, self._setting = f"{SCHEME}{self._root}", setting
        self._bucket, _, self._prefix = self._root.partition("/")
        if not url.startswith(SCHEME) or not self._bucket:
            raise PlanError(
                f"expected {setting}=s3://bucket/prefix, got '{url}'",
                f"give the bucket and the prefix, or unset {setting}",
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

    def check(self) -> None:
        """Raise ObjectStoreError unless the store answers, and may be listed."""
        options = {"Bucket": self._bucket, "Prefix": self._prefix, "MaxKeys": 1}
        self._call(self._fs.call_s3, "list_objects_v2", **options)

    def put_file(self, file: Path, name: str) -> None:
        """Upload a file."""
        self._call(self._fs.put_file, str(file), self._path(name))

    def put(self, content: bytes, name: str) -> None:
        """Write an object."""
        self._call(self._fs.pipe_file, self._path(name), content)

    def get(self, name: str) -> bytes:
        """Read an object. FileNotFoundError if there is none."""
        content: bytes = self._call(self._fs.cat_file, self._path(name))
        return content

    def chunks(self, name: str) -> Iterator[bytes]:
        """Read an object in parts. FileNotFoundError if there is none."""
        path = self._path(name)
        size = self._call(self._fs.info, path)["size"]
        for start in range(0, size, CHUNK_BYTES):
            yield self._call(
                self._fs.cat_file, path, start=start, end=min(start + CHUNK_BYTES, size)
            )

    def objects(self) -> Iterator[StoredObject]:
        """Yield all objects."""
        found = self._call(self._fs.find, self._root, detail=True)
        for path, details in found.items():
            name = path.removeprefix(f"{self._root}/")
            yield StoredObject(name, details["size"], details["LastModified"])

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects. One that is not there is no error."""
        keys = [self._path(name).removeprefix(f"{self._bucket}/") for name in names]
        for start in range(0, len(keys), MAX_DELETED):
            batch = [{"Key": key} for key in keys[start : start + MAX_DELETED]]
            order = {"Objects": batch, "Quiet": True}
            answer = self._call(
                self._fs.call_s3, "delete_objects", Bucket=self._bucket, Delete=order
            )
            if errors := answer.get("Errors"):
                raise ObjectStoreError(
                    f"the store '{self.url}' keeps {len(errors)} objects: {errors[0]['Message']}",
                    "give the credentials the right to delete",
                )

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

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
                    raise StoreAway(
                        f"no answer from the store '{self.url}' for {self._wait_s:g} s:"
                        f" {type(error).__name__}: {error}",
                        "check the network and AWS_ENDPOINT_URL and run the command again, which"
                        f" continues; or unset {self._setting} to use only local folders",
                    ) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _is_away(self, error: Exception) -> bool:
        if isinstance(error, (*self._unreachable, ConnectionError, TimeoutError)):
            return True
        return isinstance(error, OSError) and error.errno in AWAY

    def _refusal(self, error: Exception) -> ObjectStoreError:
        if _no_bucket(error):
            return ObjectStoreError(
                f"the store '{self.url}' has no such bucket",
                f"create it, or correct {self._setting}",
            )
        if isinstance(error, self._exceptions.NoCredentialsError):
            return ObjectStoreError(
                f"no credentials for the store '{self.url}'",
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
            )
        return ObjectStoreError(
            f"the store '{self.url}' refuses: {type(error).__name__}: {error}",
            f"check {self._setting}, the credentials, and their rights to list, read and write",
        )


def _no_bucket(error: BaseException) -> bool:
    response = getattr(error.__cause__, "response", None) or {}
    return bool(response.get("Error", {}).get("Code") == "NoSuchBucket")
