"""S3 in this process, with one empty bucket. Needs moto[server] and the extra `s3`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BUCKET = "bucket"


class S3Server:
    """A server that keeps its objects when it is stopped and started again."""

    def __init__(self) -> None:
        self._server: Any = None
        self._port = 0

    def start(self) -> None:
        """Start, later on the same port as before."""
        module = pytest.importorskip("moto.server", reason="needs moto[server]")
        self._server = module.ThreadedMotoServer("127.0.0.1", self._port, verbose=False)
        self._server.start()
        _, self._port = self._server.get_host_and_port()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"


@contextmanager
def running_s3() -> Iterator[S3Server]:
    """Start a server, and stop it at the end. Skips where the extra is missing."""
    pytest.importorskip("s3fs", reason="needs the extra `s3`")
    server = S3Server()
    server.start()
    try:
        yield server
    finally:
        server.stop()


def s3_client(url: str, patch: pytest.MonkeyPatch, folder: Path) -> Any:
    """Set the variables of AWS for this server, and return a client of it. The bucket is empty."""
    import boto3

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    for name, value in {
        "AWS_CONFIG_FILE": str(folder / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }.items():
        patch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    for name in object_names(client):
        client.delete_object(Bucket=BUCKET, Key=name)
    return client


def object_names(client: Any) -> list[str]:
    """Return the keys of all objects of the bucket."""
    listed = client.list_objects_v2(Bucket=BUCKET).get("Contents", ())
    return [item["Key"] for item in listed]
