"""The application itself, in this process, with its real layers, and with compiles that are
accepted and never run. Its connections get raw bytes over a socket.

A case of the application is a line of JSON with the request's head, and its body behind it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from fastapi import FastAPI

from pipeline.errors import InternalError
from service.auth import LOCAL
from service.codecs.oip import HEADER_LENGTH
from service.context import Service
from service.devices.leases import Leases, utc_now
from service.devices.policy import Devices
from service.errors import TimedOut
from service.grpc.codec import parsed
from service.grpc.methods import METHODS, Call
from service.http.error_responses import answer_error
from service.http.guard import Message, Receive, Send
from service.jobs.queue import JobRunner
from service.jobs.state import Job
from service.jobs.store import Once
from service.storage.audit_entry import SERVICE, Actor
from service.storage.files import StoredFile
from tests.fuzz import messages
from tests.fuzz.mutation import Make, bytes_from, json_from, mutated, zip_from
from tests.fuzz.parsers import PARSERS, make_archive, make_oip, make_plan
from tests.fuzz.running import Read, Target
from tests.service.builders.app import opened_desk
from tests.service.builders.connections import listening
from tests.service.builders.jobs import WITHIN_S, new_job
from tests.service.builders.serving import MODELS, DoubleServing

SERVED = ("add", "photos", "same_bfloat16", "same_float32", "same_uint64", "broken")
MAKES = {target.name: target.make for target in PARSERS}
DATA = MAKES["npz"]


class Refused(Exception):
    """The service refused a request in its own form."""


# -- the application -----------------------------------------------------------------

EARLIER = "earlier"  # the job that every request gets


class AcceptingRunner(JobRunner):
    """Accepts every job and runs none. The job gets another id, so that its upload is removed, as
    that of a request that equals an earlier one.
    """

    async def submit(
        self,
        job: Job,
        once: Once | None = None,
        actor: Actor = SERVICE,
        files: Sequence[StoredFile] = (),
    ) -> tuple[Job, bool]:
        return job.model_copy(update={"id": EARLIER}), False


@contextmanager
def running_service(folder: Path) -> Iterator[tuple[asyncio.Runner, FastAPI, Service]]:
    """An application and the event loop that it lives in."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        desk = runner.run(
            stack.enter_async_context(opened_desk(folder / "home", shared_memory=True))
        )
        service, first = desk.service, desk.service.runner
        job = new_job(service.folders, "earlier", "gpu:9").model_copy(update={"id": EARLIER})
        service.jobs.add(job, utc_now())  # a compile for targets refers to its jobs
        leases = Leases(Devices(("cpu",)))
        service.runner = AcceptingRunner(service.settings, service.jobs, leases)
        service.serving = DoubleServing({name: MODELS[name] for name in SERVED})
        try:
            yield runner, desk.app, service
        finally:
            runner.run(first.stop())
            runner.run(stack.aclose())


@contextmanager
def application(folder: Path) -> Iterator[Read]:
    with running_service(folder) as (runner, app, _):

        def read(case: bytes) -> None:
            head, _, body = case.partition(b"\n")
            status, answer = runner.run(_asked(app, json.loads(head), body))
            _check_answer(status, answer)

        yield read


@contextmanager
def grpc_methods(folder: Path) -> Iterator[Read]:
    """A case is the number of a method, and its message."""
    methods = [METHODS[name] for name in sorted(METHODS)]
    with running_service(folder) as (runner, _, service):

        async def call(case: bytes) -> None:
            method = methods[case[0] % len(methods)] if case else methods[0]
            try:
                message = parsed(method.takes, case[1:])
                own = Call(service, LOCAL, None, "ipv4:127.0.0.1:50051", ())
                (await method.does(own, message)).SerializeToString()
            except Exception as error:
                answer = answer_error(error, "", service.folders)
                if answer.status >= 500 and not isinstance(error, TimedOut):
                    raise
                _check_answer(answer.status, answer.json)

        yield lambda case: runner.run(call(case))


async def _asked(app: FastAPI, head: Mapping[str, Any], body: bytes) -> tuple[int, bytes]:
    """Send a request to the application, its body in two pieces."""
    half = len(body) // 2
    pieces = [
        {"type": "http.request", "body": body[:half], "more_body": True},
        {"type": "http.request", "body": body[half:], "more_body": False},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        if pieces:
            return pieces.pop(0)
        await asyncio.Event().wait()  # the client stays
        raise InternalError("the event was never set")

    async def send(message: Message) -> None:
        sent.append(message)

    path, _, query = head["path"].partition("?")
    headers = [("host", "localhost:8000"), ("content-length", str(len(body))), *head["headers"]]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": head["method"],
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8", "replace"),
        "query_string": query.encode("utf-8", "replace"),
        "headers": [
            (name.lower().encode("latin-1"), value.encode("latin-1", "replace"))
            for name, value in headers
        ],
        "client": ("127.0.0.1", 50051),
        "server": ("localhost", 8000),
    }
    async with asyncio.timeout(WITHIN_S):
        await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def _check_answer(status: int, body: bytes) -> None:
    """TimedOut is right where the client has set a time of microseconds."""
    assert status < 500 or status == TimedOut.status, (status, body)
    if status >= 400:
        answer = json.loads(body)
        assert {"error", "code"} <= set(answer) <= {"error", "code", "next"}, answer
        assert all(isinstance(text, str) and text for text in answer.values()), answer
        raise Refused(answer["error"])


# -- its requests -----------------------------------------------------------------------


def request(method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes) -> bytes:
    head = {"method": method, "path": path, "headers": headers}
    return json.dumps(head).encode() + b"\n" + body


def make_upload(random: Random) -> bytes:
    """A model of any kind, mostly with a plan, sometimes with data; or a broken body."""
    content_type = messages.UPLOAD.decode()
    if random.random() < 0.2:
        headers = [("content-type", mutated(random, [messages.UPLOAD]).decode("latin-1"))]
        return request("POST", "/compile", headers, mutated(random, messages.MULTIPART))
    kinds: tuple[tuple[Make, str], ...] = (
        (bytes_from(messages.onnx_model()), "m.onnx"),
        (packed_model, random.choice(("m.zip", "m.tar.gz", "m.tgz", "m.onnx"))),
        (bytes_from(messages.MODELS[1][1:]), "m.safetensors"),
        (DATA, random.choice(("m.pt2", "m.pkl"))),
    )
    make, filename = random.choice(kinds)
    body = messages.part("model", make(random), filename)
    if random.random() < 0.7:
        plan = random.choice((make_plan, lambda random: b"architecture: resnet18", NAMED))(random)
        body += messages.part("plan", plan, "plan.yaml")
    if random.random() < 0.3:
        body += messages.part("calibration", DATA(random), "c.npz")
    headers = [("content-type", content_type)]
    if random.random() < 0.1:
        headers.append(("idempotency-key", random.choice(("", "k", "é" * 300))))
    return request("POST", "/compile", headers, body + messages.END)


def packed_model(random: Random) -> bytes:
    """A model in an archive, in every second case an intact one."""
    return ARCHIVE if random.random() < 0.5 else make_archive(random)


ARCHIVE = zip_from({"model.onnx": lambda random: messages.onnx_model()})(Random(0))
NAMED = bytes_from(b"name: n", b"{name: n, candidates: [{backend: onnxruntime}]}")
BODIES: Mapping[str, Make] = {
    "application/json": json_from(
        {"inputs": {"a": [[1, 2, 3, 4]], "b": [[1, 2, 3, 4]]}, "outputs": ["sum"]},
        {"inputs": {"a": [[1, 2, 3, 4]], "b": [[1, 2, 3, 4]]}, "timeout_s": 1.5},
    ),
    "application/octet-stream": bytes_from(messages.ROW.tobytes()),
    "application/x-npy": MAKES["npy"],
    "application/x-npz": DATA,
    "image/png": MAKES["image"],
}
FITTING = {"application/json": "add", "image/png": "photos"}  # else same_float32
QUERIES = ("shape=1,4", "shape=", "shape=9999999999999999,1", "version=1", "outputs=y", "outputs=,")
ACCEPT = ("*/*", "application/json", "application/x-npz", "application/x-npy", "text/html;q=0.5")


def make_infer(random: Random) -> bytes:
    kind = random.choice(tuple(BODIES))
    headers = [("content-type", kind)]
    if random.random() < 0.3:
        headers.append(("accept", random.choice(ACCEPT)))
    if random.random() < 0.1:
        headers.append(("content-encoding", random.choice(("gzip", "deflate", "br", "x"))))
    if random.random() < 0.4:
        name = random.choice(("same_float32", "same_float32", *SERVED))
        case = make_oip(random)
        length = int.from_bytes(case[:2], "little")
        if length != 0xFFFF:
            headers.append((HEADER_LENGTH, random.choice((str(length), "-1", "x", "9" * 30))))
        return request("POST", f"/v2/models/{name}/infer", headers, case[2:])
    fitting = FITTING.get(kind, "same_float32")
    name = random.choice(SERVED) if random.random() < 0.2 else fitting
    path = random.choice((f"/models/{name}/infer",) * 9 + ("/infer",))
    if random.random() < 0.3:
        path += "?" + mutated(random, [query.encode() for query in QUERIES]).decode("latin-1")
    return request("POST", path, headers, BODIES[kind](random))


REGION = {"key": "/crucible-fuzz", "offset": 0, "byte_size": 16}
OPERATIONS: Sequence[tuple[str, str, object]] = (
    ("POST", "/compile", {"config": "digits"}),
    ("POST", "/models/add/promote", {"report": "1", "override": True}),
    ("POST", "/models/add/rollback", {}),
    ("POST", "/models/add/benchmark", {"version": 1}),
    ("POST", "/models/add/recompile", {"dry_run": True}),
    (
        "PUT",
        "/models/add/deployment",
        {"instances": 2, "max_batch": 8, "device": "cpu", "overlap": True, "timeout_s": 1.0},
    ),
    ("POST", "/v2/repository/index", {"ready": True}),
    ("POST", "/v2/repository/models/add/load", {"parameters": {}}),
    ("POST", "/v2/systemsharedmemory/region/r/register", REGION),
    ("GET", "/v2/systemsharedmemory/status", {}),
    ("GET", "/jobs?limit=5&after=x&state=failed", {}),
    ("GET", "/jobs/1/log", {}),
    ("POST", "/jobs/1/cancel", {}),
    ("GET", "/reports/1", {}),
    ("GET", "/models/add/shapes", {}),
    ("GET", "/v2/models/add/versions/1/stats", {}),
    ("GET", "/metrics", {}),
)


def make_call(random: Random) -> bytes:
    """A request to another path, with JSON where it takes some; path and headers are odd, too."""
    method, path, document = random.choice(OPERATIONS)
    if random.random() < 0.4:
        path = mutated(random, [path.encode() for _, path, _ in OPERATIONS]).decode("latin-1")
    headers = [("content-type", "application/json")]
    if random.random() < 0.3:
        name = random.choice(("accept", "authorization", "origin", "x-request-id", "last-event-id"))
        value = mutated(random, [b"Bearer abc", b"http://localhost:8000", b"7", b"text/html;q=0.5"])
        headers.append((name, value.decode("latin-1")))
    body = b"" if method == "GET" else json_from(document)(random)
    return request(method, path, headers, body)


# -- connections --------------------------------------------------------------------------


class _Errors(logging.Handler):
    """Keeps what the libraries report of errors in their callbacks."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(self.format(record))


async def echo(scope: Message, receive: Receive, send: Send) -> None:
    """An application that reads the body and answers."""
    while (message := await receive())["type"] == "http.request" and message.get("more_body"):
        continue
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def connections(folder: Path) -> Iterator[Read]:
    errors, logger = _Errors(), logging.getLogger()
    with listening(echo, 1) as address:

        def read(case: bytes) -> None:
            answer = b""
            with socket.create_connection(address, WITHIN_S) as client:
                try:
                    client.sendall(case)
                    client.shutdown(socket.SHUT_WR)
                    while piece := client.recv(65536):
                        answer += piece
                except ConnectionError:  # refused before all of it was read
                    pass
            assert not errors.records, errors.records
            status = re.match(rb"HTTP/1\.1 ([1-4])\d\d ", answer)
            assert status or not answer, answer
            if not status or status[1] == b"4":
                raise Refused(answer)

        logger.addHandler(errors)
        try:
            yield read
        finally:
            logger.removeHandler(errors)


SETTLED = 3000
APPLICATION = (
    Target("compile", make_upload, application, (Refused,), settles=SETTLED),
    Target("infer", make_infer, application, (Refused,)),
    Target("api", make_call, application, (Refused,), settles=SETTLED),
    Target("grpc_methods", bytes_from(*messages.calls()), grpc_methods, (Refused,), weight=2),
    Target("connection", bytes_from(*messages.HTTP), connections, (Refused,), weight=2),
)
