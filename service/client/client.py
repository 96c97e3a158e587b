"""The client of one server."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import quote, unquote

import httpx
import numpy as np
from httpx_sse import SSEError
from pydantic import ValidationError

from pipeline.core.artifacts import Engine
from pipeline.core.frozen import Frozen
from pipeline.core.shapes import Tensors
from pipeline.errors import PlanError, UserError
from pipeline.results.report import Report
from service.client.address import DEFAULT_URL
from service.client.errors import RemoteError, Unreachable, refusal_of
from service.client.events import Event, events_of_stream, wait_times
from service.client.upload import Upload
from service.http.schemas import (
    FORMS,
    CompileView,
    JobPage,
    JobView,
    LimitsView,
    NodePage,
    RecompileView,
)
from service.jobs.state import FINAL, State
from service.registry.models import (
    BenchmarkRequest,
    DeploymentOptions,
    ModelPage,
    ModelView,
    PromoteRequest,
    RecompileRequest,
)
from service.registry.traffic import ShapesView
from service.storage.key import FORM
from service.submission.tar import untar

if TYPE_CHECKING:
    from pipeline.llm.results import AnyReport

TIMEOUT_S = 30.0
# until the server has unpacked an upload, or has loaded a model
ANSWER_S = 1800.0
PATIENT = httpx.Timeout(TIMEOUT_S, read=ANSWER_S)
SILENT_S = 60.0  # four heartbeats without an event: then the connection is dead
# longest absence of the server between two events: it may have to stop its jobs, start, and probe
# its host
PATIENCE_S = 300.0
TRANSIENT = frozenset({502, 503, 504})  # status codes of a proxy while the server restarts

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
"""Content-Types of inference inputs, by file suffix."""

M = TypeVar("M", bound=Frozen)


@dataclass(frozen=True, slots=True)
class Inference:
    """A model's answer with its timing."""

    model: str
    version: int
    device: str
    batch_size: int  # rows that ran together
    outputs: Tensors  # bfloat16 as float32
    times_ms: Mapping[str, float]  # queue, copy_in, compute, copy_out


class Client:
    """Client of one server. Not thread-safe: use one per thread."""

    def __init__(self, url: str = DEFAULT_URL, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        if not re.match(r"https?://[^/\s]", self.url):
            raise PlanError(
                f"expected the address of a service, got '{url}'", f"for example {DEFAULT_URL}"
            )
        if key is not None and not FORM.fullmatch(key.strip()):
            raise UserError(
                "the key is not a Crucible key",
                "give the complete key that `crucible keys create` printed",
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
        """Send a model, streamed from the disk. Returns its job, or the job of an earlier equal
        request. PlanError if its plan has targets: they are compiled, and `compile` returns them.
        """
        added = self.compile(upload, idempotency_key)
        if isinstance(added, CompileView):
            raise PlanError(
                f"the plan has targets: its compile {added.id} runs, with a job for each",
                "follow it with `Client.follow_compile`, and use `Client.compile` for such plans",
            )
        return added

    def compile(self, upload: Upload, idempotency_key: str | None = None) -> JobView | CompileView:
        """Send a model, streamed from the disk. Returns its job or, if its plan has targets, a
        compile with a job for each.
        """
        with contextlib.ExitStack() as files:
            headers = _idempotency_header(idempotency_key)
            return self._added(
                self._ask(
                    "POST", "/compile", files=upload.parts(files), headers=headers, timeout=PATIENT
                )
            )

    def _added(self, answer: httpx.Response) -> JobView | CompileView:
        if answer.headers.get("Location", "").startswith("/compiles/"):
            return self._parsed(CompileView, answer)
        return self._parsed(JobView, answer)

    def follow_compile(
        self, compile_id: str, patience_s: float = PATIENCE_S
    ) -> Iterator[CompileView]:
        """Yield a compile for several targets about every second, until all have ended, even if
        the server restarts meanwhile. Unreachable as for `events`.
        """
        waits = iter(wait_times(patience_s))
        while True:
            try:
                view = self.compiled(compile_id)
            except (Unreachable, RemoteError) as error:
                if isinstance(error, RemoteError) and error.status not in TRANSIENT:
                    raise
                if (wait_s := next(waits, None)) is None:
                    raise
                time.sleep(wait_s)
                continue
            yield view
            if view.outcome is not None:
                return
            waits = iter(wait_times(patience_s))
            time.sleep(1.0)

    def compiled(self, compile_id: str) -> CompileView:
        """Return a compile for several targets, as it is now."""
        return self._parsed(CompileView, self._ask("GET", _path("compiles", compile_id)))

    def submit_config(self, name: str, idempotency_key: str | None = None) -> JobView | CompileView:
        """Compile one of the server's own plans. Returns as `compile` does."""
        headers = _idempotency_header(idempotency_key)
        return self._added(self._ask("POST", "/compile", json={"config": name}, headers=headers))

    def job(self, job_id: str) -> JobView:
        return self._parsed(JobView, self._ask("GET", _path("jobs", job_id)))

    def jobs(
        self, state: State | None = None, limit: int = 50, after: str | None = None
    ) -> JobPage:
        """List jobs, newest first. Pass `next` of a page as `after` for the next page."""
        query = {"state": state, "limit": limit, "after": after}
        query = {name: value for name, value in query.items() if value is not None}
        return self._parsed(JobPage, self._ask("GET", "/jobs", params=query))

    def cancel(self, job_id: str) -> JobView:
        return self._parsed(JobView, self._ask("DELETE", _path("jobs", job_id)))

    def retry(self, job_id: str) -> JobView:
        """Add a new job for one that failed or was cancelled."""
        return self._parsed(JobView, self._ask("POST", _path("jobs", job_id, "retry")))

    def report(self, job_id: str) -> Report:
        """Return the report of engines of a job that has succeeded. UserError if it compiled a
        language model.
        """
        report = self.any_report(job_id)
        if not isinstance(report, Report):
            raise UserError(
                f"job {job_id} compiled a language model, expected one that compiled engines",
                "call `Client.any_report`",
            )
        return report

    def any_report(self, job_id: str) -> AnyReport:
        """Return the report of a job that has succeeded, of engines or of a language model."""
        from pipeline.llm.results import any_report_from_json

        return any_report_from_json(
            self._ask("GET", _path("reports", job_id)).content,
            f"{self.url}/reports/{job_id}",
            Path(),
        )

    def limits(self) -> LimitsView:
        """Return the limits of this client's key and of its owner, and what is used of them."""
        return self._parsed(LimitsView, self._ask("GET", "/limits"))

    def nodes(self) -> NodePage:
        """Return the servers and nodes that run jobs. Needs an admin key."""
        return self._parsed(NodePage, self._ask("GET", "/nodes"))

    def models(self) -> ModelPage:
        return self._parsed(ModelPage, self._ask("GET", "/models"))

    def model(self, name: str) -> ModelView:
        return self._parsed(ModelView, self._ask("GET", _path("models", name)))

    def shapes(self, name: str) -> ShapesView:
        """Return the shapes of the requests and batches of a loaded model, and the profiles that
        they suggest.
        """
        return self._parsed(ShapesView, self._ask("GET", _path("models", name, "shapes")))

    def promote(self, name: str, report: str, override: bool = False) -> ModelView:
        """Make a report's engine the model's current version. If the model is deployed, the new
        version answers when this returns.
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
        """Add a job that measures a model's engine again: that of `version`, else of the loaded
        version, else of the current one.
        """
        answer = self._ask(
            "POST",
            _path("models", name, "benchmark"),
            json=BenchmarkRequest(version=version).model_dump(mode="json"),
            headers=_idempotency_header(idempotency_key),
            timeout=PATIENT,
        )
        return self._parsed(JobView, answer)

    def recompile(
        self,
        name: str,
        dry_run: bool = False,
        idempotency_key: str | None = None,
        profiles: Literal["traffic", "same"] = "traffic",
    ) -> RecompileView:
        """Add a job that compiles a model again: with the profiles that the traffic of its loaded
        version suggests, or with those of its plan.
        """
        answer = self._ask(
            "POST",
            _path("models", name, "recompile"),
            json=RecompileRequest(profiles=profiles, dry_run=dry_run).model_dump(mode="json"),
            headers=_idempotency_header(idempotency_key),
            timeout=PATIENT,
        )
        return self._parsed(RecompileView, answer)

    def load(self, name: str, options: DeploymentOptions | None = None) -> ModelView:
        """Load a model. It is ready when this returns."""
        return self._changed(
            "PUT", _path("models", name, "deployment"), options or DeploymentOptions()
        )

    def unload(self, name: str) -> None:
        """Unload a model. All waiting requests are answered when this returns."""
        self._ask("DELETE", _path("models", name, "deployment"), timeout=PATIENT)

    def download(self, job_id: str, folder: Path) -> AnyReport:
        """Fill `folder` as `crucible compile` does: the report in its three forms and, unless the
        model was rejected, the engine.
        """
        from pipeline.llm.engine import LanguageEngine
        from pipeline.report.bundle import deliver_engine, load_delivered, withdraw_engine

        report = self.any_report(job_id)
        folder.mkdir(parents=True, exist_ok=True)
        for form, name in FORMS.items():
            answer = self._ask("GET", _path("reports", job_id), headers={"Accept": form})
            (folder / name).write_bytes(answer.content)
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
            with packed.open("rb") as file:
                untar(file, Path(work))
            kind = Engine if isinstance(report, Report) else LanguageEngine
            deliver_engine(load_delivered(Path(work) / "engine", kind), folder / "engine")
        return report

    def infer(
        self,
        body: bytes,
        kind: str,
        model: str | None = None,
        outputs: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> Inference:
        """Run inference on a body with the Content-Type `kind`, such as a .npy file. `model` may be
        None if only one model is deployed.
        """
        answer = self.infer_as("application/x-npz", body, kind, model, outputs, timeout_s)
        with np.load(io.BytesIO(answer.content), allow_pickle=False) as arrays:
            tensors = dict(arrays)
        headers = answer.headers
        times = re.findall(r"(\w+);dur=([\d.]+)", headers["Server-Timing"])
        return Inference(
            model=unquote(headers["Crucible-Model"]),
            version=int(headers["Crucible-Version"]),
            device=headers["Crucible-Device"],
            batch_size=int(headers["Crucible-Batch-Size"]),
            outputs=tensors,
            times_ms={name: float(time) for name, time in times},
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
        """Run inference and return the answer in the form `accept`."""
        query: dict[str, str | float] = {}
        if outputs:
            query["outputs"] = ",".join(outputs)
        if timeout_s:
            query["timeout_s"] = timeout_s
        path = "/infer" if model is None else _path("models", model, "infer")
        headers = {"Content-Type": kind, "Accept": accept}
        timeout = httpx.Timeout(TIMEOUT_S, read=timeout_s + TIMEOUT_S if timeout_s else ANSWER_S)
        return self._ask("POST", path, params=query, content=body, headers=headers, timeout=timeout)

    def events(
        self, job_id: str, after: int = 0, patience_s: float = PATIENCE_S
    ) -> Iterator[Event]:
        """Yield the events of a job to its end: each one once, even if the server restarts
        meanwhile.

        Unreachable if the server cannot be reached at first, or later for longer than `patience_s`.
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
                if not known or (isinstance(error, RemoteError) and error.status not in TRANSIENT):
                    raise
            wait_s = next(waits, None)
            if wait_s is None:
                raise Unreachable(
                    f"{self.url} has not answered for {patience_s:.0f} s",
                    "the job continues when the service runs again: repeat the command later",
                )
            time.sleep(wait_s)

    # -- requests -------------------------------------------------------------

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
        return self._parsed(ModelView, self._ask(method, path, json=json_body, timeout=PATIENT))

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request with these options of httpx, as `_send` does."""
        return self._send(self._http.build_request(method, path, **options))

    def _send(self, request: httpx.Request, stream: bool = False) -> httpx.Response:
        """Send a request and return its answer. RemoteError if the server refuses it."""
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
            f"{self.url} answers in a form that this version of Crucible does not know",
            "check the address and the server's version",
        )

    def _unreachable(self, error: httpx.TransportError) -> Unreachable:
        message = f"no answer from {self.url}: {error or type(error).__name__}"
        return Unreachable(
            message,
            "start the service with `crucible serve`, or give another address with --url or"
            " CRUCIBLE_URL",
        )


def _idempotency_header(idempotency_key: str | None) -> dict[str, str]:
    return {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}


def _path(*parts: str) -> str:
    return "".join(f"/{quote(part, safe='')}" for part in parts)
