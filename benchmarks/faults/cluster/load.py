"""Clients of the cluster: each submits a job, follows it to its end, reads its report, and one
promotes it. They send a request again as a good client does.

A request is answered, or refused clearly (a status of REFUSALS with a code and the next step), or
its connection broke. Anything else is a fault of the service, and written down. What was
acknowledged is kept, to be compared with the database.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from service.jobs.state import FINAL
from tests.service.builders.app import model_bytes, parts

ATTEMPT_S = 60.0
PATIENCE_S = 180.0  # for one request with all its repetitions, and for a job
PAUSE_S, LOOK_S = 0.25, 0.25
REFUSALS = (429, 502, 503, 504)

Files = dict[str, tuple[str, bytes]]
Outcome = Literal["answered", "refused", "broken"]


class NoAnswer(Exception):
    """A request without a right answer; the message tells why."""


@dataclass(slots=True)
class Load:
    """Requests of several clients, and what became of them."""

    url: str
    clients: int
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)  # what no client should see
    accepted: dict[str, str] = field(default_factory=dict)  # the name of each job by its id
    ended: dict[str, str] = field(default_factory=dict)  # the state of each job by its id
    reports: dict[str, str] = field(default_factory=dict)  # what a client read, by job
    promoted: dict[str, list[str]] = field(default_factory=dict)  # jobs by model
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the clients work until the block ends, and each finish its last job."""
        threads = [
            threading.Thread(target=self._work, args=(each,)) for each in range(self.clients)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _work(self, client: int) -> None:
        number = 0
        while not self._stop.is_set():
            try:
                self.run_job(f"client-{client}-{number}", f"model-{client}" if client == 0 else "")
            except NoAnswer as error:
                with self._lock:
                    self.faults.append(str(error))
            number += 1

    def submit(
        self, name: str, target: str = "", wait_for_node_s: float = 0, upload: Files | None = None
    ) -> str:
        """Submit a job of this name, for a target, and return its id."""
        files = upload or parts(name, model_bytes(name))
        if target:
            plan = {"name": name, "targets": [target], "wait_for_node_s": wait_for_node_s}
            files["plan"] = ("plan.yaml", json.dumps(plan).encode())
        with httpx.Client(base_url=self.url, timeout=ATTEMPT_S) as client:
            headers = {"Idempotency-Key": f"key of {name}"}
            body = self._ask(client, "POST", "/compile", files=files, headers=headers).json()
        job = str(body["targets"][0]["job"]["id"] if target else body["id"])
        with self._lock:
            self.accepted[job] = name
        return job

    def run_job(self, name: str, model: str = "") -> None:
        """Submit a job of this name, and do all that is done with it."""
        self.finish(self.submit(name), model)

    def cancel(self, job: str) -> None:
        """Cancel a job, which need not succeed any more, and may have ended."""
        with self._lock:
            del self.accepted[job]
        with httpx.Client(base_url=self.url, timeout=ATTEMPT_S) as client:
            client.delete(f"/jobs/{job}")

    def finish(self, job: str, model: str = "") -> None:
        """Follow a job to its end, read its report, and promote it to a version of `model`."""
        with httpx.Client(base_url=self.url, timeout=ATTEMPT_S) as client:
            ended = self._end_of(client, job)
            with self._lock:
                self.ended[job] = ended["state"]
            if ended["state"] != "succeeded":
                raise NoAnswer(f"job {job} is {ended['state']}: {ended['failure']}")
            report = self._ask(
                client, "GET", f"/reports/{job}", headers={"Accept": "text/markdown"}
            )
            with self._lock:
                self.reports[job] = report.text
            if model:
                body = {"report": job, "override": True}
                self._ask(client, "POST", f"/models/{model}/promote", json=body)
                with self._lock:
                    self.promoted.setdefault(model, []).append(job)

    def _end_of(self, client: httpx.Client, job: str) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while True:
            view: dict[str, Any] = self._ask(client, "GET", f"/jobs/{job}").json()
            if view["state"] in FINAL:
                return view
            if time.monotonic() > end:
                raise NoAnswer(f"job {job} is {view['state']} after {PATIENCE_S:g} s")
            time.sleep(LOOK_S)

    def _ask(self, client: httpx.Client, method: str, path: str, **more: Any) -> httpx.Response:
        """Send a request until it is answered."""
        end, last = time.monotonic() + PATIENCE_S, ""
        while time.monotonic() < end:
            wait_s = PAUSE_S
            try:
                answer = client.request(method, path, **more)
            except httpx.TimeoutException as error:
                raise NoAnswer(f"{method} {path}: no answer in {ATTEMPT_S:g} s") from error
            except httpx.TransportError as error:
                self._count("broken")
                last = f"{type(error).__name__}: {error}"
            else:
                last = f"{answer.status_code} {answer.text[:300]}"
                if answer.is_success:
                    self._count("answered")
                    return answer
                if not is_clear(answer):
                    raise NoAnswer(f"{method} {path}: {last}")
                self._count("refused")
                wait_s = min(float(answer.headers.get("Retry-After", PAUSE_S)), 1.0)
            time.sleep(wait_s)
        raise NoAnswer(f"{method} {path}: no right answer in {PATIENCE_S:g} s; the last: {last}")

    def _count(self, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes[outcome] += 1


def is_clear(answer: httpx.Response) -> bool:
    """Whether a refusal says what happened, and that the request may be sent again."""
    if answer.status_code not in REFUSALS:
        return False
    try:
        body = json.loads(answer.text)
    except ValueError:
        return False
    return isinstance(body, dict) and all(body.get(name) for name in ("error", "code", "next"))
