"""A client of the service, for programs and for `crucible submit | wait | report | promote | load |
benchmark`. Loads nothing of the server.

    with Client("http://127.0.0.1:8000", key) as client:
        job = client.submit(Upload(Path("model.onnx"), plan=Path("plan.yaml")))
        for event in client.events(job.id): ...      to the job's end, over restarts of the server
        report = client.report(job.id)

RemoteError carries what the server says of a request that it refuses; Unreachable, that nobody
answers.
"""

from __future__ import annotations

import contextlib
import io
import re
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar
from urllib.parse import quote, unquote

import httpx
import numpy as np
from httpx_sse import EventSource, SSEError
from pydantic import ValidationError

from pipeline.core import Frozen, Tensors
from pipeline.errors import CrucibleError, HostError, PlanError, UserError
from pipeline.results.report import Report
from service.http.schemas import FORMS, JobPage, JobView, Refusal
from service.jobs.state import FINAL, State
from service.registry.models import (
    BenchmarkRequest,
    DeploymentOptions,
    ModelPage,
    ModelView,
    PromoteRequest,
    ShapesView,
)
from service.storage.keys import FORM
from service.submission.tar import untar

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 30.0
# after the last byte of an upload, which may have to be unpacked; until a model is loaded
ANSWER_S = 1800.0
SILENT_S = 60.0  # of a stream of events, four heartbeats: then the connection is dead
# without the server, between two events: it may have to stop its jobs, start, and look at its host
PATIENCE_S = 300.0
MAX_WAIT_S = 5.0
TRY_AGAIN = frozenset({502, 503, 504})  # what a proxy says while the server is restarted
WHERE = re.compile(r"(https?://.+?)/(?:jobs|reports)/([^/?#]+)(?:[/?#].*)?")
JOB_ID = re.compile(r"[0-9a-f]{25}")

KINDS = {
    ".npy": "application/x-npy",
    ".npz": "application/x-npz",
    ".json": "application/json",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
    ".bin": "application/octet-stream",
}
"""What is inferred from, by the ends of files' names."""

M = TypeVar("M", bound=Frozen)


class RemoteError(CrucibleError):
    """What the server says of a request that it refuses, in its words, with its `code` and the HTTP
    status.
    """

    exit_code = 1

    def __init__(
        self, message: str, next_step: str = "", code: str = "service", status: int = 0
    ) -> None:
        super().__init__(message, next_step)
        self.code, self.status = code, status


class Unreachable(HostError):
    code = "service.unreachable"


@dataclass(frozen=True, slots=True)
class Upload:
    """Files to compile. `model`: ONNX, an archive of ONNX with external data, or safetensors with
    an `architecture` in the plan.
    """

    model: Path
    plan: Path | str | None = None  # a file, or the plan itself
    calibration: Path | None = None
    selection: Path | None = None
    validation: Path | None = None

    def parts(self, opened: contextlib.ExitStack) -> dict[str, tuple[str, IO[bytes] | str]]:
        """What there is, by the name of its part: its file's name and content."""
        named = {
            name: getattr(self, name)
            for name in ("model", "plan", "calibration", "selection", "validation")
        }
        return {
            name: (
                ("plan.yaml", part)
                if isinstance(part, str)
                else (part.name, opened.enter_context(_open(part)))
            )
            for name, part in named.items()
            if part is not None
        }


@dataclass(frozen=True, slots=True)
class Inference:
    """What a model answered, and where the time went."""

    model: str
    version: int
    device: str
    batch_size: int  # rows that ran together
    outputs: Tensors  # bfloat16 as float32
    times_ms: Mapping[str, float]  # queue, copy_in, compute, copy_out


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to a job."""

    seq: int  # rises; give the last one to `events` to go on after it
    kind: str  # "stage", or the State that the job came to
    data: Mapping[str, Any]


class Client:
    """One server. Not safe for threads: give each its own."""

    def __init__(self, url: str = DEFAULT_URL, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        if not re.match(r"https?://[^/\s]", self.url):
            raise PlanError(
                f"expected the address of a service, got '{url}'", f"for example {DEFAULT_URL}"
            )
        if key is not None and not FORM.fullmatch(key.strip()):
            raise UserError(
                "what was given as the key is no Crucible key",
                "give the whole text that `crucible keys create` printed",
            )
        headers = {"Authorization": f"Bearer {key.strip()}"} if key is not None else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_S)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def submit(self, upload: Upload, idempotency_key: str | None = None) -> JobView:
        """Send a model, streamed from the disk; the job, which may be that of an equal request
        before.
        """
        with contextlib.ExitStack() as opened:
            timeout, headers = httpx.Timeout(TIMEOUT_S, read=ANSWER_S), _once(idempotency_key)
            request = self._http.build_request(
                "POST", "/compile", files=upload.parts(opened), headers=headers, timeout=timeout
            )
            return self._parsed(JobView, self._send(request))

    def submit_config(self, name: str, idempotency_key: str | None = None) -> JobView:
        """Compile one of the server's own plans."""
        request = self._http.build_request(
            "POST", "/compile", json={"config": name}, headers=_once(idempotency_key)
        )
        return self._parsed(JobView, self._send(request))

    def job(self, job_id: str) -> JobView:
        return self._parsed(JobView, self._ask("GET", _path("jobs", job_id)))

    def jobs(
        self, state: State | None = None, limit: int = 50, after: str | None = None
    ) -> JobPage:
        """Jobs, newest first; `next` of a page is the `after` of the one that follows."""
        given = {"state": state, "limit": limit, "after": after}
        return self._parsed(
            JobPage,
            self._ask(
                "GET", "/jobs", {name: value for name, value in given.items() if value is not None}
            ),
        )

    def cancel(self, job_id: str) -> JobView:
        return self._parsed(JobView, self._ask("DELETE", _path("jobs", job_id)))

    def retry(self, job_id: str) -> JobView:
        """A new job for one that failed or was cancelled."""
        return self._parsed(JobView, self._ask("POST", _path("jobs", job_id, "retry")))

    def report(self, job_id: str) -> Report:
        """The report of a job that has succeeded."""
        from pipeline.report.files import report_from_json

        return report_from_json(
            self._ask("GET", _path("reports", job_id)).content,
            f"{self.url}/reports/{job_id}",
            Path(),
        )

    def models(self) -> ModelPage:
        return self._parsed(ModelPage, self._ask("GET", "/models"))

    def model(self, name: str) -> ModelView:
        return self._parsed(ModelView, self._ask("GET", _path("models", name)))

    def shapes(self, name: str) -> ShapesView:
        """What requests to a loaded model were like, and the profile they suggest."""
        return self._parsed(ShapesView, self._ask("GET", _path("models", name, "shapes")))

    def promote(self, name: str, report: str, override: bool = False) -> ModelView:
        """Make a report's engine the model's current version; where the model is deployed, that
        answers when this returns.
        """
        return self._changed(
            "POST",
            _path("models", name, "promote"),
            PromoteRequest(report=report, override=override),
        )

    def rollback(self, name: str) -> ModelView:
        return self._changed("POST", _path("models", name, "rollback"), None)

    def benchmark(
        self, name: str, version: int | None = None, idempotency_key: str | None = None
    ) -> JobView:
        """A job that measures a model's engine again: this version's, or what is loaded, or the
        current one's.
        """
        asked = BenchmarkRequest(version=version).model_dump(mode="json")
        request = self._http.build_request(
            "POST",
            _path("models", name, "benchmark"),
            json=asked,
            headers=_once(idempotency_key),
            timeout=_patient(),
        )
        return self._parsed(JobView, self._send(request))

    def load(self, name: str, options: DeploymentOptions | None = None) -> ModelView:
        """Ready when this returns."""
        return self._changed(
            "PUT", _path("models", name, "deployment"), options or DeploymentOptions()
        )

    def unload(self, name: str) -> None:
        """All that waited is answered when this returns."""
        self._send(
            self._http.build_request(
                "DELETE", _path("models", name, "deployment"), timeout=_patient()
            )
        )

    def download(self, job_id: str, folder: Path) -> Report:
        """Fill `folder` as `crucible compile` does: the report in its three forms and, unless the
        model was rejected, the engine.
        """
        from pipeline.report.bundle import deliver_engine, load_engine, withdraw_engine

        report = self.report(job_id)
        folder.mkdir(parents=True, exist_ok=True)
        for form, name in FORMS.items():
            request = self._http.build_request(
                "GET", _path("reports", job_id), headers={"Accept": form}
            )
            (folder / name).write_bytes(self._send(request).content)
        if not report.has_engine:
            withdraw_engine(folder / "engine")
            return report
        with tempfile.TemporaryDirectory(dir=folder) as work:
            packed = Path(work) / "engine.tar"
            with (
                packed.open("wb") as file,
                self._streamed(
                    self._http.build_request("GET", _path("reports", job_id, "engine.tar"))
                ) as answer,
            ):
                file.writelines(answer.iter_bytes())
            with tarfile.open(packed) as archive:
                untar(archive, Path(work))
            deliver_engine(load_engine(Path(work) / "engine"), folder / "engine")
        return report

    def infer(
        self,
        body: bytes,
        kind: str,
        model: str | None = None,
        outputs: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> Inference:
        """An answer to a body of this Content-Type, such as a .npy file's; the model may be left
        out where one is deployed.
        """
        answer = self.infer_as("application/x-npz", body, kind, model, outputs, timeout_s)
        with np.load(io.BytesIO(answer.content), allow_pickle=False) as arrays:
            tensors = dict(arrays)
        about = answer.headers
        times = re.findall(r"(\w+);dur=([\d.]+)", about["Server-Timing"])
        whole = (
            int(about["Crucible-Version"]),
            about["Crucible-Device"],
            int(about["Crucible-Batch-Size"]),
        )
        return Inference(
            unquote(about["Crucible-Model"]),
            *whole,
            tensors,
            {name: float(time) for name, time in times},
        )

    def infer_as(
        self,
        accept: str,
        body: bytes,
        kind: str,
        model: str | None = None,
        outputs: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """The same in any form that the service gives."""
        query: dict[str, str | float] = {
            **({"outputs": ",".join(outputs)} if outputs else {}),
            **({"timeout_s": timeout_s} if timeout_s else {}),
        }
        path = "/infer" if model is None else _path("models", model, "infer")
        headers = {"Content-Type": kind, "Accept": accept}
        timeout = httpx.Timeout(TIMEOUT_S, read=timeout_s + TIMEOUT_S if timeout_s else ANSWER_S)
        return self._send(
            self._http.build_request(
                "POST", path, params=query, content=body, headers=headers, timeout=timeout
            )
        )

    def events(
        self, job_id: str, after: int = 0, patience_s: float = PATIENCE_S
    ) -> Iterator[Event]:
        """What happens to a job, to its end: each event once, also if the server is restarted
        meanwhile.

        Unreachable if it cannot be reached at first, or is away for longer than `patience_s` later.
        """
        waits, known = iter(wait_times(patience_s)), False
        while True:
            try:
                request = self._http.build_request(
                    "GET",
                    _path("jobs", job_id, "events"),
                    headers={"Last-Event-ID": str(after)},
                    timeout=httpx.Timeout(TIMEOUT_S, read=SILENT_S),
                )
                with self._streamed(request) as answer:
                    known = True
                    for event in events_of_stream(answer):
                        after, waits = event.seq, iter(wait_times(patience_s))
                        yield event
                if self.job(job_id).state in FINAL:
                    return
            except (Unreachable, RemoteError) as error:
                if not known or (isinstance(error, RemoteError) and error.status not in TRY_AGAIN):
                    raise
            if (wait_s := next(waits, None)) is None:
                raise Unreachable(
                    f"{self.url} has been away for {patience_s:.0f} s",
                    "the job goes on when the service does: ask again later",
                )
            time.sleep(wait_s)

    # -- how it asks -------------------------------------------------------------

    @contextlib.contextmanager
    def _streamed(self, request: httpx.Request) -> Iterator[httpx.Response]:
        answer = self._send(request, stream=True)
        try:
            yield answer
        except SSEError as error:
            raise self._foreign() from error
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        finally:
            answer.close()

    def _changed(self, method: str, path: str, body: Frozen | None) -> ModelView:
        json_body = None if body is None else body.model_dump(mode="json")
        return self._parsed(
            ModelView,
            self._send(self._http.build_request(method, path, json=json_body, timeout=_patient())),
        )

    def _ask(
        self, method: str, path: str, query: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        return self._send(self._http.build_request(method, path, params=query))

    def _send(self, request: httpx.Request, stream: bool = False) -> httpx.Response:
        """The answer, if it is a success."""
        try:
            answer = self._http.send(request, stream=stream)
            if not answer.is_success:
                answer.read()
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if not answer.is_success:
            raise refusal_of(answer.status_code, answer.content, self.url)
        return answer

    def _parsed(self, kind: type[M], answer: httpx.Response) -> M:
        try:
            return kind.model_validate_json(answer.content)
        except ValidationError as error:
            raise self._foreign() from error

    def _foreign(self) -> RemoteError:
        return RemoteError(
            f"{self.url} answers, but not as this version of Crucible does",
            "check the address and the server's version",
        )

    def _unreachable(self, error: httpx.TransportError) -> Unreachable:
        message = f"no answer from {self.url}: {error or type(error).__name__}"
        return Unreachable(
            message, "start it with `crucible serve`, or name another with --url or CRUCIBLE_URL"
        )


def place_of(text: str, url: str | None) -> tuple[str | None, str]:
    """The server and the job that a user means: by a job's id on the server at `url`, or by any
    address of a job or its report.
    """
    if match := WHERE.fullmatch(text):
        return match[1], match[2]
    if not re.fullmatch(r"\w+", text):
        raise PlanError(
            f"'{text}' is neither a job's id nor an address of a job or a report",
            f"for example {DEFAULT_URL}/reports/ID",
        )
    return url, text


def is_remote(text: str) -> bool:
    """Whether a text names a job or something on a server, and not a folder."""
    return bool(JOB_ID.fullmatch(text) or text.startswith(("http://", "https://")))


def wait_times(patience_s: float) -> Iterator[float]:
    """How long to wait before each next try, until patience ends: half a second, then twice as long
    each time, up to MAX_WAIT_S.
    """
    wait_s, waited_s = 0.5, 0.0
    while waited_s < patience_s:
        yield wait_s
        waited_s += wait_s
        wait_s = min(2 * wait_s, MAX_WAIT_S)


def events_of_stream(answer: httpx.Response) -> Iterator[Event]:
    """Server-sent events, as the service writes them. Heartbeats, and what has no number, are left
    out; so is what is cut off at the end.
    """
    last = 0  # the id of an event holds for those after it that have none
    for event in EventSource(answer).iter_sse():
        if event.id and (seq := int(event.id)) > last:
            last = seq
            yield Event(seq, event.event, event.json())


def refusal_of(status: int, body: bytes, url: str) -> RemoteError:
    """A refused request as an error: the server's own sentence, if it is one of ours that spoke."""
    try:
        said = Refusal.model_validate_json(body)
    except ValidationError:
        return RemoteError(
            f"{url} answered with HTTP status {status}",
            "check that this is the address of a Crucible service",
            status=status,
        )
    return RemoteError(said.error, said.next, said.code, status)


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(
            f"cannot read '{path}': {error.strerror}", "check the path and its permissions"
        ) from error


def _once(idempotency_key: str | None) -> dict[str, str]:
    return {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}


def _patient() -> httpx.Timeout:
    """An engine is tried, loaded and warmed up before the answer."""
    return httpx.Timeout(TIMEOUT_S, read=ANSWER_S)


def _path(*parts: str) -> str:
    return "".join(f"/{quote(part, safe='')}" for part in parts)
