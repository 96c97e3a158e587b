"""A language model through POST /compile and the real worker: from the upload to the report, its
pages and the engine.
"""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.llm.engine import LanguageEngine
from pipeline.llm.results import LanguageReport, load_any_report
from pipeline.report.bundle import load_delivered
from service.jobs.queue import WORKER
from service.submission.tar import tar
from tests.pipeline.llm.models import language_plan, write_model
from tests.service.builders.app import Desk, opened_desk

for package in ("openvino_genai", "openvino_tokenizers", "gguf", "accelerate", "nncf"):
    pytest.importorskip(package, reason=f"language models: no {package}")

SECTIONS: dict[str, Any] = {
    "candidates": [{"weights": "int8", "kv_cache": "f32", "arithmetic": "f32"}],
    "benchmark": {"prompt_tokens": 16, "output_tokens": 4, "budget_s": 3},
    "accuracy": {"max_perplexity_increase": 1.0},
}


def upload(folder: Path, model: Path) -> dict[str, tuple[str, bytes]]:
    """The parts of an upload of a model's folder, with texts."""
    plan = language_plan(folder, model, **SECTIONS)
    texts = {role: Path(plan["texts"].pop(role)) for role in ("selection", "validation")}
    return {
        "model": ("tiny.tar", b"".join(tar(model))),
        "plan": ("plan.yaml", yaml.safe_dump({**plan, "language_model": {}}).encode()),
        **{role: (file.name, file.read_bytes()) for role, file in texts.items()},
    }


@pytest.mark.slow
def test_an_uploaded_language_model_is_compiled_and_its_report_shown(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", scale=0.2)

    async def story() -> None:
        async with opened_desk(tmp_path / "home", worker=WORKER) as desk:
            answer = await desk.client.post("/compile", files=upload(tmp_path, model))
            assert answer.status_code == 202, answer.text
            await check_answers(desk, await succeeded(desk, answer.json()["id"]))
            again = await desk.client.post("/compile", files=upload(tmp_path, model))
            assert (again.status_code, again.json()["id"]) == (200, answer.json()["id"])

    asyncio.run(story())


async def succeeded(desk: Desk, job_id: str) -> dict[str, Any]:
    """Wait, without a limit: a compile takes minutes on a busy machine."""
    job = {"state": "queued"}
    while job["state"] in ("queued", "running"):
        await asyncio.sleep(0.1)
        job = (await desk.client.get(f"/jobs/{job_id}")).json()
    assert job["state"] == "succeeded", (
        job["failure"],
        (await desk.client.get(f"/jobs/{job_id}/log")).text,
    )
    return job


async def check_answers(desk: Desk, job: dict[str, Any]) -> None:
    """What the server answers of a report."""
    get, report_at = desk.client.get, f"/reports/{job['id']}"
    folder = desk.service.folders.report(job["id"])
    report = load_any_report(folder)
    assert isinstance(report, LanguageReport)
    assert (job["verdict"], job["winner"] or "") == (report.verdict, report.winner)
    for form, text in (("text/html", "perplexity"), ("text/markdown", report.verdict)):
        assert text in (await get(report_at, headers={"Accept": form})).text
    events = desk.service.jobs.events(job["id"])
    made = {event.data["stage"] for event in events if event.data.get("state") == "finished"}
    assert {"describe", "export_language_model", "reference", "weights", "score", "race"} <= made
    figures = {each.label: each for each in desk.service.jobs.figures(job["id"])}
    assert figures["transformers fp32"].is_baseline
    assert figures["int8 kv-f32 f32"].accuracy is not None
    assert figures["int8 kv-f32 f32"].latency is not None
    latency = (await get(f"{report_at}/latency")).json()
    assert latency["baseline"]["label"] == "transformers fp32"
    assert [each["label"] for each in latency["candidates"]] == ["int8 kv-f32 f32"]
    accuracy = (await get(f"{report_at}/accuracy")).json()
    assert accuracy["candidates"][0]["selection"]["failures"] == []
    assert (await get(f"{report_at}/samples")).status_code == 200
    page = (await get(f"/ui/jobs/{job['id']}")).text
    assert report.headline.split(":")[0][:40] in page
    packed = await get(f"{report_at}/engine.tar")
    if report.has_engine:
        with tarfile.open(fileobj=io.BytesIO(packed.content)) as archive:
            names = {member.name for member in archive}
        assert {"engine/engine.json", "engine/openvino_model.xml"} <= names
        assert load_delivered(folder / "engine", LanguageEngine).label == report.winner
    else:
        assert packed.status_code == 404
    texts = [file for file in folder.rglob("*") if file.is_file()]
    home = str(desk.service.folders.home).encode()
    assert [file for file in texts if home in file.read_bytes()] == []
    assert json.loads((folder / "report.json").read_text())["kind"] == "language_model"
