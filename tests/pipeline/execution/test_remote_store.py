"""Artifacts in S3, over HTTP: shared by two hosts, checked, and safe from kills and absences."""

import contextlib
import errno
import gc
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from pipeline.cli.commands.host import store as show_store
from pipeline.core.artifacts import Artifact
from pipeline.core.progress import Progress
from pipeline.errors import BackendUnavailable, ChildDied, PlanError, StoreError
from pipeline.execution.child_process import call_in_child
from pipeline.execution.remote_store import RemoteStore, open_store
from pipeline.execution.store import Key, Manifest, Store
from tests.pipeline.execution.s3 import object_names, running_s3, s3_client

KEY = Key("export", 1, ("abc",))
MANIFEST_AT = f"prefix/manifests/export/{KEY.digest}"
URL = "s3://bucket/prefix"


class Text(Artifact):
    length: int


def make(folder: Path) -> Text:
    (folder / "sub").mkdir()
    (folder / "sub" / "text").write_text("hello")
    return Text(root=folder, file="sub/text", length=5)


def never(folder: Path) -> Text:
    raise AssertionError("made again")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with running_s3() as server:
        yield server.url


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A client of the server, whose `bucket` is empty."""
    return s3_client(endpoint, monkeypatch, tmp_path)


def blob(client: Any) -> str:
    (name,) = [name for name in object_names(client) if "/blobs/" in name]
    return name


def put(client: Any, name: str, content: bytes) -> None:
    client.put_object(Bucket="bucket", Key=name, Body=content)


def body(client: Any, name: str) -> bytes:
    content: bytes = client.get_object(Bucket="bucket", Key=name)["Body"].read()
    return content


def host(root: Path, **options: Any) -> Store:
    """A store with its own cache, as on a host of its own."""
    options = {"cache_bytes": 2**30, **options}
    return Store(root, remote=RemoteStore(URL, wait_s=1), **options)


def test_what_one_host_made_another_finds(tmp_path: Path, s3: Any) -> None:
    assert not host(tmp_path / "a").get(KEY, Text, make).reused
    found = host(tmp_path / "b").get(KEY, Text, never)
    assert found.reused
    assert found.value.path.read_text() == "hello"
    assert found.value.root.is_relative_to(tmp_path / "b")
    assert host(tmp_path / "b").remote.size()[0] == 1  # type: ignore[union-attr]
    assert list((tmp_path / "a" / "unpushed").iterdir()) == []


def test_what_is_not_cacheable_is_not_shared(tmp_path: Path, s3: Any) -> None:
    host(tmp_path).get(KEY, Text, make, is_cacheable=lambda text: False)
    assert object_names(s3) == []


def hostile(name: str) -> Callable[[Any], None]:
    """Plant a manifest that names a file outside, with a right digest of its own."""

    def plant(client: Any) -> None:
        manifest = Manifest.model_validate_json(body(client, MANIFEST_AT))
        (digest,) = manifest.files.values()
        other = manifest.model_copy(update={"files": {name: digest}}).sealed()
        put(client, MANIFEST_AT, json.dumps(other.model_dump(mode="json")).encode())

    return plant


def move(client: Any) -> None:
    """Put the manifest of another key here."""
    content = json.loads(body(client, MANIFEST_AT))
    content["provenance"]["inputs"] = ["other"]
    sealed = Manifest.model_validate(content).sealed()
    put(client, MANIFEST_AT, json.dumps(sealed.model_dump(mode="json")).encode())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda client: put(client, blob(client), b"hellO"), "'sub/text' has another digest"),
        (lambda client: put(client, blob(client), b""), "'sub/text' has another digest"),
        (
            lambda client: client.delete_object(Bucket="bucket", Key=blob(client)),
            "'sub/text' is missing in 's3://bucket/prefix'",
        ),
        (
            lambda client: put(client, MANIFEST_AT, body(client, MANIFEST_AT)[:-40]),
            "'artifact.json' Invalid JSON",
        ),
        (lambda client: put(client, MANIFEST_AT, b""), "'artifact.json' Invalid JSON"),
        (move, "another key than that of its provenance"),
        (hostile("../../../escaped"), "no name of a file"),
        (hostile("/tmp/escaped"), "no name of a file"),
        (hostile("sub/../../escaped"), "no name of a file"),
        (hostile("a//b"), "no name of a file"),
        (hostile(""), "no name of a file"),
        (hostile("artifact.json"), "no name of a file"),
        (hostile("a\0b"), "no name of a file"),
    ],
)
def test_a_damaged_artifact_is_refused_by_name_made_again_and_mended(
    tmp_path: Path, s3: Any, damage: Callable[[Any], None], message: str
) -> None:
    host(tmp_path / "a").get(KEY, Text, make)
    damage(s3)
    second = host(tmp_path / "b")
    again = second.get(KEY, Text, make)
    assert not again.reused
    assert f"export {KEY.digest[:12]} is damaged in" in second.notes[0].text
    assert message in second.notes[0].text
    assert list(tmp_path.rglob("escaped")) == []
    assert host(tmp_path / "c").get(KEY, Text, never).reused


class KilledBeforeTheManifest(RemoteStore):
    """The process dies when all files are uploaded, and the manifest is not."""

    def _call(self, function: Callable[..., Any], *arguments: object, **options: object) -> Any:
        if function == self._fs.pipe_file:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._call(function, *arguments, **options)


def make_and_die(root: Path, progress: Progress) -> None:
    Store(root, remote=KilledBeforeTheManifest(URL)).get(KEY, Text, make)


def test_a_killed_upload_is_not_read_and_the_next_use_completes_it(tmp_path: Path, s3: Any) -> None:
    with pytest.raises(ChildDied, match="SIGKILL"):
        call_in_child(make_and_die, tmp_path, name="killed")
    assert object_names(s3) == [blob(s3)]
    (tmp_path / "other").mkdir()
    assert not RemoteStore(URL).fetch("export", KEY.digest, tmp_path / "other")
    host(tmp_path).get(Key("export", 1, ("next",)), Text, make)
    assert host(tmp_path / "b").get(KEY, Text, never).reused


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_a_store_that_is_away_gives_one_clear_error(
    tmp_path: Path, s3: Any, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed_port}")
    with pytest.raises(StoreError, match="no answer from the store 's3://bucket/prefix' for 1 s"):
        host(tmp_path).get(KEY, Text, never)


def test_a_store_that_never_answers_gives_one_clear_error(
    tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.execution.object_store.READ_TIMEOUT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StoreError, match=r"no answer .* ReadTimeoutError"):
            host(tmp_path).get(KEY, Text, never)


class AwayForWrites(RemoteStore):
    def push(self, folder: Path) -> None:
        raise StoreError("no answer", "wait")


def test_a_result_that_cannot_be_pushed_stays_and_is_pushed_at_the_next_use(
    tmp_path: Path, s3: Any
) -> None:
    store = Store(tmp_path / "a", remote=AwayForWrites(URL), cache_bytes=0)
    assert store.get(KEY, Text, make).value.path.read_text() == "hello"
    assert "is not shared yet: no answer" in store.notes[0].text
    del store
    gc.collect()
    other = host(tmp_path / "a", cache_bytes=0)
    other._shrink()
    assert other.find(KEY, Text), "what is not pushed is not evicted"
    other.get(Key("export", 1, ("next",)), Text, make)
    assert host(tmp_path / "b").get(KEY, Text, never).reused


def test_a_pending_result_that_was_damaged_is_not_pushed(tmp_path: Path, s3: Any) -> None:
    store = Store(tmp_path / "a", remote=AwayForWrites(URL))
    store.get(KEY, Text, make).value.path.write_text("hellO")
    host(tmp_path / "a").get(Key("export", 1, ("next",)), Text, make)
    assert MANIFEST_AT not in object_names(s3)


@pytest.mark.parametrize(
    ("url", "credentials", "message"),
    [("s3://nowhere/prefix", True, "no such bucket"), (URL, False, "no credentials")],
)
def test_a_store_that_cannot_be_used_says_why(
    tmp_path: Path,
    s3: Any,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    credentials: bool,
    message: str,
) -> None:
    if not credentials:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match=message):
        Store(tmp_path, remote=RemoteStore(url, wait_s=1)).get(KEY, Text, never)


@pytest.mark.parametrize("url", ["http://host/x", "s3://", "/folder"])
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(PlanError, match="expected CRUCIBLE_STORE=s3://bucket/prefix"):
        open_store(environ={"CRUCIBLE_STORE": url})


def test_a_size_that_is_no_number_is_refused() -> None:
    with pytest.raises(PlanError, match="number of bytes, got '1 GB'"):
        open_store(environ={"CRUCIBLE_STORE": URL, "CRUCIBLE_STORE_CACHE_BYTES": "1 GB"})


def test_without_the_extra_one_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(BackendUnavailable, match="needs the extra `s3`, which is not installed"):
        open_store(environ={"CRUCIBLE_STORE": URL})


def test_the_environment_names_the_store(
    tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRUCIBLE_HOME", str(tmp_path))
    assert open_store(environ={}).remote is None
    store = open_store(environ={"CRUCIBLE_STORE": f"{URL}/"})
    assert store.remote is not None
    assert (store.root, store.remote.url) == (tmp_path, URL)


def test_the_command_shows_both_sizes(
    tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host(tmp_path).get(KEY, Text, make)
    monkeypatch.setenv("CRUCIBLE_HOME", str(tmp_path))
    monkeypatch.setenv("CRUCIBLE_STORE", URL)
    show_store(as_json=True)
    local, remote = json.loads(capsys.readouterr().out)
    assert (local["place"], local["artifacts"]) == ("local", 1)
    assert (remote["place"], remote["artifacts"]) == ("remote", 1)
    assert local["bytes"] == remote["bytes"] > 5
    show_store(as_json=False)
    assert f"remote: 1 artifacts, 0.0 MiB, {URL}" in capsys.readouterr().out


def race(root: Path, lock: Path, built: Path, progress: Progress) -> None:
    def make_and_count(folder: Path) -> Text:
        with built.open("a") as file:
            file.write("built\n")
        return make(folder)

    store = host(root, build_lock=lambda key: FileLock(lock.with_name(key.digest)))
    assert store.get(KEY, Text, make_and_count).value.path.read_text() == "hello"


def test_two_hosts_with_one_lock_build_once(tmp_path: Path, s3: Any) -> None:
    built = tmp_path / "built"
    with ThreadPoolExecutor(2) as pool:
        hosts = [
            pool.submit(call_in_child, race, tmp_path / name, tmp_path / "lock", built, name=name)
            for name in ("a", "b")
        ]
        for each in hosts:
            each.result()
    assert built.read_text() == "built\n"


def test_a_host_that_waited_for_the_lock_takes_what_the_other_made(tmp_path: Path, s3: Any) -> None:
    """Both have found nothing before either has the lock: the worst order of two hosts."""

    @contextlib.contextmanager
    def lock_after_the_other(key: Key) -> Iterator[None]:
        host(tmp_path / "a").get(KEY, Text, make)
        yield

    found = host(tmp_path / "b", build_lock=lock_after_the_other).get(KEY, Text, never)
    assert found.reused


def key(number: int) -> Key:
    return Key("export", 1, (str(number),))


def test_the_least_recently_used_goes_first_and_comes_back(tmp_path: Path, s3: Any) -> None:
    for number in range(3):
        host(tmp_path).get(key(number), Text, make)
        gc.collect()
    folders = {number: host(tmp_path).find(key(number), Text) for number in range(3)}
    roots = {number: stored.value.root for number, stored in folders.items() if stored}
    gc.collect()
    for number, used_s in ((0, 300), (1, 100), (2, 200)):
        os.utime(roots[number] / "artifact.json", (used_s, used_s))
    size = sum(file.stat().st_size for file in roots[0].rglob("*") if file.is_file())
    host(tmp_path, cache_bytes=int(2.5 * size))._shrink()
    assert {number for number, root in roots.items() if root.exists()} == {0, 2}
    assert host(tmp_path).get(key(1), Text, never).reused


def test_what_is_in_use_stays_even_if_it_alone_is_above_the_limit(tmp_path: Path, s3: Any) -> None:
    running = host(tmp_path, cache_bytes=1)
    first = running.get(key(0), Text, make).value
    other = host(tmp_path, cache_bytes=1)
    second = other.get(key(1), Text, make).value
    assert first.path.exists()
    assert second.path.exists()
    del running
    gc.collect()
    other._shrink()
    assert not first.root.exists()
    assert second.path.exists()


def test_what_another_process_makes_is_not_evicted(tmp_path: Path, s3: Any) -> None:
    root = host(tmp_path).get(KEY, Text, make).value.root
    gc.collect()
    started, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with FileLock(tmp_path / "locks" / f"{KEY.digest}.lock"):
            started.set()
            ended.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    started.wait(60)
    host(tmp_path, cache_bytes=0)._shrink()
    assert root.exists()
    ended.set()
    holder.join()
    host(tmp_path, cache_bytes=0)._shrink()
    assert not root.exists()


class FullDisk(RemoteStore):
    """The local disk is full before a byte is written."""

    def fetch(self, stage: str, digest: str, folder: Path) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_local_disk_is_no_damage_and_leaves_nothing(tmp_path: Path, s3: Any) -> None:
    with pytest.raises(OSError, match="No space left"):
        Store(tmp_path, remote=FullDisk(URL)).get(KEY, Text, never)
    assert list((tmp_path / "tmp").iterdir()) == []
