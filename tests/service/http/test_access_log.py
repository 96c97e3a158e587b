"""One line and one set of figures per request; no key in any of them."""

import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import Collection, Mapping, MutableMapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pipeline.compiler import compile
from pipeline.compiler.candidates import stages as candidate_stages
from pipeline.execution.stage_event import StageEvent
from service.auth import Caller
from service.http.access_log import AccessLog
from service.jobs.state import Died, Failure, Job
from service.observability.prometheus import STAGES, Metrics
from service.storage.layout import Folders

KEY = f"cru_0123456789_{'A' * 43}"


def logged(tmp_path: Path, program: str) -> list[dict[str, Any]]:
    """What a program logs, line by line. In a process of its own: pytest has handlers in this one's
    root logger.
    """
    begin = (
        "import logging; from service import logs; from service.settings import Settings;"
        f" logs.configure(Settings(home={str(tmp_path)!r}))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", begin + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in result.stderr.splitlines()]


def ask(metrics: Metrics, path: str, route: str | None, status: int = 200) -> None:
    async def inside(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        scope["state"] = {"caller": Caller("me", ("infer",), "0123456789"), "request_id": "r1"}
        if route:
            scope["route"] = SimpleNamespace(path=route)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"12345"})

    async def nothing(*_: Any) -> Any:
        return None

    asyncio.run(
        AccessLog(inside, metrics, Folders(Path("/h")), lambda *_: None)(
            {"type": "http", "method": "GET", "path": path}, nothing, nothing
        )
    )


def test_each_request_is_one_line_of_json(tmp_path: Path) -> None:
    (line,) = logged(
        tmp_path,
        'from tests.service.http.test_access_log import *; ask(Metrics(), "/jobs/17",'
        ' "/jobs/{id}")',
    )
    assert (line["path"], line["status"], line["bytes"], line["request"], line["key"]) == (
        "/jobs/17",
        200,
        5,
        "r1",
        "0123456789",
    )
    assert line["level"] == "info"


def test_values_that_json_does_not_have_are_written_as_their_repr(tmp_path: Path) -> None:
    program = 'logs.get("a").info("odd", path=__import__("pathlib").Path("/\\xe9\\u2028"), n=None)'
    (line,) = logged(tmp_path, program)
    assert (line["path"], line["n"]) == (repr(Path("/\xe9\u2028")), None)


def test_a_line_that_cannot_be_written_fails_nobodys_work(tmp_path: Path) -> None:
    program = f"""
    import contextlib, sys
    from service import logs
    from service.settings import Settings
    logs.configure(Settings(home={str(tmp_path)!r}))
    logs.get("service.x").info("nobody reads this")
    # unless PYTHONUNBUFFERED is set, the line is still to be written
    with contextlib.suppress(OSError):
        sys.stderr.close()
    logs.get("service.x").info("nor this")
    sys.stderr = None
    logs.get("service.x").error("nor this")
    print("done")
    """
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            check=False,
        )
    assert result.stdout == "done\n"


def test_a_key_is_blotted_out_wherever_it_turns_up(tmp_path: Path) -> None:
    program = f"""
    logs.get("a").warning("odd", text="header was Bearer {KEY}")
    logging.getLogger("uvicorn.error").warning("bad header %s", "{KEY}")
    try:
        raise ValueError("{KEY}")
    except ValueError:
        logs.get("b").exception("failed")
        logging.getLogger("c").exception("failed")
    """
    lines = logged(tmp_path, program)
    assert [line["logger"] for line in lines] == ["a", "uvicorn.error", "b", "c"]
    assert all("cru_***" in str(line) and KEY not in str(line) for line in lines)
    assert all("Traceback" in line["exception"] for line in lines[2:])


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


def test_stages_are_counted_by_their_known_names() -> None:
    metrics, job = (
        Metrics(),
        Job(id="1", owner="me", identity="i", name="n", device="cpu", created="2026-01-01"),
    )
    for stage in ("build", "made up by a child"):
        metrics.observe_job(job, StageEvent(stage, state="finished", seconds=2.0))
    metrics.observe_job(
        job.model_copy(update={"state": "failed"}), Died(Failure(code="c", message="m"))
    )
    text = metrics.text().decode()
    assert 'crucible_stage_seconds_sum{stage="build"} 2.0' in text
    assert 'crucible_stage_seconds_sum{stage="other"} 2.0' in text
    assert 'crucible_jobs_ended_total{state="failed"} 1.0' in text


def test_the_known_stages_are_those_of_the_pipeline() -> None:
    stages = (*compile.STAGES, *candidate_stages.STAGES)
    assert {stage.name for stage in stages} == STAGES


class Nvml(ModuleType):
    """Some GPUs; counts who has not shut it down. `lacks`: what GPUs do not support, by number."""

    NVMLError, opened = OSError, 0

    def __init__(self, count: int = 2, lacks: Mapping[str, Collection[int]] | None = None) -> None:
        super().__init__("nvml")
        self._count, self._lacks = count, lacks or {}

    def _check(self, function: str, number: int) -> None:
        if number in self._lacks.get(function, ()):
            raise OSError("Not Supported")

    def nvmlInit(self) -> None:  # noqa: N802
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self._count

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        self._check("handle", number)
        return number

    def nvmlDeviceGetUUID(self, number: int) -> str:  # noqa: N802
        self._check("uuid", number)
        return f"GPU-{number}000-abcd"

    def nvmlDeviceGetMemoryInfo(self, number: int) -> SimpleNamespace:  # noqa: N802
        self._check("memory", number)
        return SimpleNamespace(used=1000 + number, free=7000 - number, total=8000)

    def nvmlDeviceGetUtilizationRates(self, number: int) -> SimpleNamespace:  # noqa: N802
        self._check("busy", number)
        return SimpleNamespace(gpu=25 * number)


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def used_bytes(nvml: Nvml) -> dict[str, float]:
    """Memory in use by device, as /metrics tells it."""
    metrics = Metrics()
    metrics.collect_devices(nvml)
    text, name = metrics.text().decode(), "crucible_device_memory_used"
    lines = [line for line in text.splitlines() if line.startswith(name)]
    assert nvml.opened == 0
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def test_gpus_are_numbered_as_everywhere_in_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpu:0 is the first that CUDA_VISIBLE_DEVICES leaves; GPUs of others raise no alert."""
    assert used_bytes(Nvml(4)) == {f"gpu:{n}": 1000.0 + n for n in range(4)}
    for visible in ("3,1", "GPU-3,GPU-1000-abcd"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert used_bytes(Nvml(4)) == {"gpu:0": 1003.0, "gpu:1": 1001.0}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert used_bytes(Nvml(4)) == {}


def test_what_nvml_does_not_tell_of_a_gpu_is_left_out() -> None:
    metrics = Metrics()
    metrics.collect_devices(Nvml(3, lacks={"memory": {0}, "busy": {1}, "uuid": {0, 1, 2}}))
    text = metrics.text().decode()
    lines = [line for line in text.splitlines() if line.startswith("crucible_device_")]
    memory = [line.split()[0] for line in lines if "_memory_bytes" in line]
    busy = [line.split()[0] for line in lines if "_busy_ratio" in line]
    assert memory == [f'crucible_device_memory_bytes{{device="gpu:{n}"}}' for n in (1, 2)]
    assert busy == [f'crucible_device_busy_ratio{{device="gpu:{n}"}}' for n in (0, 2)]
    assert used_bytes(Nvml(3, lacks={"handle": {1}})) == {"gpu:0": 1000.0, "gpu:2": 1002.0}


def test_memory_and_busy_share_of_each_gpu_are_told() -> None:
    metrics, nvml = Metrics(), Nvml()
    metrics.collect_devices(nvml)
    text = metrics.text().decode()
    for number in range(2):
        assert (
            f'crucible_device_memory_used_bytes{{device="gpu:{number}"}} {1000 + number}.0' in text
        )
        assert f'crucible_device_memory_bytes{{device="gpu:{number}"}} 8000.0' in text
        assert f'crucible_device_busy_ratio{{device="gpu:{number}"}} {0.25 * number}' in text
    assert nvml.opened == 0


def test_without_a_gpu_there_are_no_device_figures_and_no_error() -> None:
    metrics = Metrics()
    metrics.collect_devices()
    text = metrics.text().decode()
    assert "crucible_event_streams 0.0" in text
