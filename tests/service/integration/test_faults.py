"""What a host and a stranger can do to a real server: full disks, damaged rows, archives and models
made to break it. It lives and says so.
"""

import asyncio
import io
import secrets
import shutil
import sqlite3
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import onnx
import psutil
import pytest
from onnx import TensorProto, helper

from service.client.events import events_of_stream
from service.jobs.queue import WORKER
from service.sandbox.process_tree import of_jobs
from service.storage.layout import Folders
from tests.service.builders.app import MODEL, model_bytes, parts
from tests.service.builders.jobs import WITHIN_S, running
from tests.service.integration.test_docs import served
from tests.service.integration.test_restart import GONE_S
from tests.service.integration.test_server import MB, Server, send, serving, state_of, until
from tests.service.jobs.test_worker import tiny_model, until_ended, upload

GIB = 2**30


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with small limits, which meets one trap after another, and lives to end in good
    order.
    """
    home = tmp_path_factory.mktemp("limited") / "home"
    home.mkdir()
    with serving(
        home, max_unpacked_bytes=MB, job_memory_bytes=GIB // 2, job_disk_bytes=GIB // 8
    ) as server:
        yield server
        assert server.end() == 0
        assert "Traceback" not in server.log()


def check_that_the_next_succeeds(server: Server) -> None:
    job = post(server, "succeed", model_bytes(secrets.token_hex(8))).json()[
        "id"
    ]  # a new one, not what an equal request made
    until(lambda: state_of(server, job) == "succeeded")


def post(server: Server, name: str, model: bytes = MODEL) -> httpx.Response:
    return httpx.post(f"{server.url}/compile", files=parts(name, model), timeout=WITHIN_S)


def fill(disk: Path) -> Path:
    """Leave no byte."""
    place = disk / "ballast"
    with suppress(OSError), place.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    assert shutil.disk_usage(disk).free == 0
    return place


def test_an_upload_larger_than_the_disk_is_507_and_leaves_nothing(small_disk: Path) -> None:
    with serving(small_disk, disk_reserve_bytes=0) as server:
        answer = post(server, "succeed", b"x" * 20 * MB)
        assert (answer.status_code, answer.json()["code"]) == (507, "host.disk_full")
        assert (
            answer.json()["error"] == "the disk is full"
        )  # as the upload met it: the database names its file
        assert str(small_disk) not in answer.text
        assert list((small_disk / "uploads").iterdir()) == []
        job = send(server, "succeed")
        until(lambda: state_of(server, job) == "succeeded")
        assert "Traceback" not in server.log()


def test_a_job_that_fills_the_disk_fails_and_the_next_succeeds(small_disk: Path) -> None:
    with serving(small_disk, disk_reserve_bytes=0) as server:
        job = send(server, "fill")
        until(lambda: state_of(server, job) == "failed")
        failure = httpx.get(f"{server.url}/jobs/{job}").json()["failure"]
        assert failure["code"] == "host.disk_full"
        assert "No space left on device" in httpx.get(f"{server.url}/jobs/{job}/log").text
        again = send(server, "succeed")
        until(lambda: state_of(server, again) == "succeeded")


def test_a_database_without_space_is_507_and_nothing_that_was_accepted_is_lost(
    small_disk: Path,
) -> None:
    with serving(small_disk, disk_reserve_bytes=0) as server:
        running = send(server, "succeed-2")
        until(lambda: state_of(server, running) == "running")
        ballast = fill(small_disk)
        refused = post(server, "fail")
        assert (refused.status_code, refused.json()["code"]) == (
            507,
            "host.disk_full",
        ), refused.text
        cancelling = httpx.delete(f"{server.url}/jobs/{running}")  # needs the database alone
        assert (cancelling.status_code, cancelling.json()["code"]) == (
            507,
            "host.disk_full",
        ), cancelling.text
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        ballast.unlink()
        until(
            lambda: state_of(server, running) in ("succeeded", "failed")
        )  # failed if it needed the disk meanwhile
        assert [job["id"] for job in httpx.get(f"{server.url}/jobs").json()["jobs"]] == [running]
        again = send(server, "succeed")
        until(lambda: state_of(server, again) == "succeeded")


def test_a_server_starts_beside_a_damaged_row_and_serves_the_others(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        damaged, intact = send(server, "hang"), send(server, "succeed")
        until(lambda: state_of(server, damaged) == "running")
        server.process.kill()
        server.process.wait()
    with closing(sqlite3.connect(tmp_path / "crucible.db")) as rows, rows:
        rows.execute("UPDATE jobs SET job = 'not JSON' WHERE id = ?", (damaged,))
    with serving(tmp_path) as server:
        until(lambda: state_of(server, intact) == "succeeded")
        answer = httpx.get(f"{server.url}/jobs/{damaged}")
        assert (answer.status_code, answer.json()["code"]) == (500, "service.damaged_row")
        assert damaged in server.log()
        assert Folders(tmp_path).uploads(damaged).is_dir()


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("eat", "job.memory", "more than its limit of 0.50 GiB"),
        ("fill", "job.disk", "more than its limit of 0.12 GiB"),
    ],
)
def test_a_job_that_takes_too_much_is_stopped_and_the_server_lives(
    limited: Server, name: str, code: str, message: str
) -> None:
    job = post(limited, name).json()["id"]
    until(lambda: state_of(limited, job) == "failed")
    failure = httpx.get(f"{limited.url}/jobs/{job}").json()["failure"]
    assert (failure["code"], message in failure["message"]) == (code, True), failure
    assert of_jobs([job]) == []
    check_that_the_next_succeeds(limited)  # the next job begins once this one was tidied
    assert Folders(limited.home).work(job).home.exists() == (
        code != "job.disk"
    )  # what it stored, for a retry


@pytest.mark.parametrize("which", ["guardian", "worker"])
def test_a_child_that_is_killed_fails_its_job_and_the_server_lives(
    limited: Server, which: str
) -> None:
    job = post(limited, "hang").json()["id"]
    until(lambda: len(of_jobs([job])) == 2)
    (killed,) = [
        process
        for process in of_jobs([job])
        if (process.ppid() == limited.process.pid) == (which == "guardian")
    ]
    killed.kill()
    until(lambda: state_of(limited, job) == "failed")
    failure = httpx.get(f"{limited.url}/jobs/{job}").json()["failure"]
    assert (failure["code"], "was killed by signal 9 (SIGKILL)" in failure["message"]) == (
        "host.child_died",
        True,
    ), failure
    assert of_jobs([job]) == []
    check_that_the_next_succeeds(limited)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


def test_deleting_a_job_that_compiles_ends_all_that_it_started(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model.onnx")
    plan = b"name: tiny\nbenchmark: {duration_s: 600}"
    with (
        served("crucible serve", tmp_path / "home") as url,
        httpx.Client(base_url=url, timeout=WITHIN_S) as client,
    ):

        def send() -> str:
            answer = client.post(
                "/compile",
                files={
                    "model": ("m.onnx", (tmp_path / "model.onnx").read_bytes()),
                    "plan": ("p", plan),
                },
            )
            assert answer.status_code == 202, answer.text
            return str(answer.json()["id"])

        job = send()
        until(
            lambda: len(of_jobs([job])) >= 3
        )  # the guardian, the worker, and the child of a stage
        processes = of_jobs([job])
        begin = time.monotonic()
        assert client.delete(f"/jobs/{job}").status_code == 202
        while any(map(is_alive, processes)) or of_jobs([job]):
            assert time.monotonic() - begin < GONE_S
            time.sleep(0.05)
        until(lambda: client.get(f"/jobs/{job}").json()["state"] == "cancelled")
        kinds = [event.kind for event in events_of_stream(client.get(f"/jobs/{job}/events"))]
        assert kinds[-2:] == ["cancelling", "cancelled"]
        assert not Folders(tmp_path / "home").work(job).temporary.exists()
        assert client.get("/readyz").status_code == 200
        assert send() != job  # an equal request begins anew


# -- archives ----------------------------------------------------------------


def zipped(**members: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "/"), content)
    return data.getvalue()


def tarred(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        archive.addfile(member)
    return data.getvalue()


@pytest.mark.parametrize(
    ("filename", "content", "status", "message"),
    [
        ("m.zip", zipped(**{"m.onnx": b"\0" * 50 * MB}), 413, "unpacks to more than 1000000 bytes"),
        ("m.zip", zipped(**{"..__..__evil.onnx": b"x"}), 422, "lies outside"),
        ("m.tar", tarred("/etc/evil.onnx"), 422, "lies outside"),
        ("m.tar", tarred("../../evil.onnx"), 422, "lies outside"),
        ("m.tar", tarred("m.onnx", tarfile.SYMTYPE, "/etc/passwd"), 422, "a link or a device"),
        ("../../evil.zip", zipped(**{"a.txt": b"x"}), 422, "0 .onnx files"),
    ],
    ids=["bomb", "zip-outside", "tar-absolute", "tar-outside", "tar-link", "no-model"],
)
def test_archives_that_are_traps_are_refused_and_leave_nothing(
    limited: Server, filename: str, content: bytes, status: int, message: str
) -> None:
    def files() -> tuple[set[str], set[str]]:
        jobs = httpx.get(f"{limited.url}/jobs?limit=200").json()["jobs"]
        return {job["id"] for job in jobs}, {
            folder.name for folder in (limited.home / "uploads").glob("*")
        }

    before = files()
    answer = httpx.post(
        f"{limited.url}/compile", files={"model": (filename, content)}, timeout=WITHIN_S
    )
    assert (answer.status_code, message in answer.json()["error"]) == (status, True), answer.text
    assert files() == before  # so it answers
    assert list(limited.home.parent.rglob("*evil*")) == []
    assert not Path("/etc/evil.onnx").exists()


# -- models ------------------------------------------------------------------


def value(name: str, kind: int, *shape: int) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def nested(depth: int) -> bytes:
    """An If in an If in an If ..., as bytes: no library of ours would write it."""

    def field(number: int, content: bytes) -> bytes:
        size, length = len(content), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + content

    graph = b""
    for _ in range(depth):
        attribute = (
            field(1, b"then_branch") + field(6, graph) + b"\xa0\x01\x05"
        )  # name, g, type: GRAPH
        graph = field(1, field(4, b"If") + field(5, attribute))
    return b"\x08\x08" + field(7, graph) + field(8, b"\x10\x11")


def one_terabyte() -> bytes:
    """y = x + ConstantOfShape of 2^38 floats."""
    size = helper.make_tensor("size", TensorProto.INT64, [1], [2**38])
    nodes = [
        helper.make_node("ConstantOfShape", ["size"], ["large"]),
        helper.make_node("Add", ["x", "large"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, 1)],
        [value("y", TensorProto.FLOAT, 2**38)],
        [size],
    )
    content: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()
    return content


def claims_one_terabyte() -> bytes:
    """An initializer that says it has 2^38 floats, and brings none."""
    large = onnx.TensorProto(name="large", data_type=TensorProto.FLOAT, dims=[2**38])
    node = helper.make_node("Add", ["x", "large"], ["y"])
    graph = helper.make_graph(
        [node],
        "g",
        [value("x", TensorProto.FLOAT, 1)],
        [value("y", TensorProto.FLOAT, 2**38)],
        [large],
    )
    content: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()
    return content


@pytest.mark.slow
def test_models_made_to_break_the_compiler_fail_their_jobs_only(tmp_path: Path) -> None:
    traps = (
        (nested(5000), "model.invalid", "is not a complete ONNX file"),
        (one_terabyte(), "job.memory", "more than its limit of 2.00 GiB"),
        (claims_one_terabyte(), "model.invalid", "is not a valid ONNX model"),
    )

    async def story() -> None:
        async with running(
            tmp_path, worker=WORKER, job_memory_bytes=2 * GIB, job_disk_bytes=GIB
        ) as bench:
            for number, (model, code, message) in enumerate(traps):
                job = upload(bench, f"{number}")
                (bench.folders.uploads(job.id) / "model.onnx").write_bytes(model)
                added, _ = await bench.runner.submit(job)
                ended = await until_ended(bench, added)
                assert ended.failure is not None
                assert (ended.failure.code, message in ended.failure.message) == (
                    code,
                    True,
                ), ended.failure

    asyncio.run(story())
