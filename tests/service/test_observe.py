"""One line and one set of figures per request; no key in any of them."""

import asyncio
import json
import logging
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service import logs
from service.guard import Caller
from service.metrics import Metrics
from service.observe import Observed
from service.settings import Settings

KEY = f"cru_0123456789_{'A' * 43}"


@pytest.fixture
def configured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    assert capsys  # stands in for stderr before the handler is made
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    logs.configure(Settings(home=tmp_path))
    yield
    root.handlers[:], root.level = before[0], before[1]


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def ask(metrics: Metrics, path: str, route: str | None, status: int = 200) -> None:
    async def inside(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        scope["state"] = {"caller": Caller("me", ("infer",), "0123456789"), "request_id": "r1"}
        if route:
            scope["route"] = SimpleNamespace(path=route)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"12345"})

    async def nothing(*_: Any) -> Any:
        return None

    asyncio.run(Observed(inside, metrics)({"type": "http", "method": "GET", "path": path}, nothing, nothing))


@pytest.mark.usefixtures("configured")
def test_each_request_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    ask(Metrics(), "/jobs/17", "/jobs/{id}")
    (line,) = lines(capsys.readouterr().err)
    assert (line["path"], line["status"], line["bytes"], line["request"], line["key"]) == ("/jobs/17", 200, 5, "r1", "0123456789")
    assert line["level"] == "info"


@pytest.mark.usefixtures("configured")
def test_a_key_is_blotted_out_wherever_it_turns_up(capsys: pytest.CaptureFixture[str]) -> None:
    logs.get("a").warning("odd", text=f"header was Bearer {KEY}")
    logging.getLogger("uvicorn.error").warning("bad header %s", KEY)
    try:
        raise ValueError(KEY)
    except ValueError:
        logs.get("b").exception("failed")
    said = capsys.readouterr().err
    assert KEY not in said
    assert said.count("cru_***") >= 3
    assert len(lines(said)) == 3


def test_figures_are_by_route_so_that_paths_of_strangers_add_none() -> None:
    metrics = Metrics()
    ask(metrics, "/jobs/1", "/jobs/{id}")
    ask(metrics, "/jobs/2", "/jobs/{id}", 404)
    for number in range(50):
        ask(metrics, f"/wp-admin/{number}", None, 404)
    text = metrics.text().decode()
    assert 'crucible_http_requests_total{method="GET",route="/jobs/{id}",status="200"} 1.0' in text
    assert 'crucible_http_requests_total{method="none",route="none",status="404"} 50.0' in text
    assert "wp-admin" not in text


def test_jobs_are_counted_when_the_figures_are_read() -> None:
    metrics, counts = Metrics(), {"queued": 2}
    metrics.collect_jobs(lambda: counts)
    assert 'crucible_jobs{state="queued"} 2.0' in metrics.text().decode()
    counts["queued"] = 5
    assert 'crucible_jobs{state="queued"} 5.0' in metrics.text().decode()


def test_without_a_gpu_there_are_no_device_figures_and_no_error() -> None:
    metrics = Metrics()
    metrics.collect_devices()
    text = metrics.text().decode()
    assert "crucible_event_streams 0.0" in text
