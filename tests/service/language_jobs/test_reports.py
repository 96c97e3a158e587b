"""Reports of language models over HTTP, on pages and in commands, with a double for the worker."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import jsonschema
import pytest

from pipeline.errors import ModelError, StoreError, UserError
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.results import LanguageReport, language_schema
from pipeline.report.bundle import load_delivered, load_engine
from pipeline.report.files import load_report
from service.client import Client
from service.jobs.publish import publish, published_engine
from service.jobs.worker import CONTENDED, doubted_language
from service.storage.layout import Folders
from tests.builders.cli import crucible
from tests.service.builders.app import MODEL, Desk, at_desk
from tests.service.builders.jobs import write_out
from tests.service.integration.test_server import serving
from tests.service.jobs.test_publish import edit
from tests.service.language_jobs.reports import (
    HOSTILE,
    INT4,
    INT8,
    sample_language_report,
    write_language_out,
)

ROOT = Path(__file__).parents[3]


def test_a_language_report_is_published_with_its_engine(tmp_path: Path) -> None:
    out, place = tmp_path / "out", tmp_path / "reports" / "1"
    write_language_out(out, tmp_path / "store")
    report = publish(out, place, Folders(tmp_path))
    assert isinstance(report, LanguageReport)
    assert (report.verdict, report.winner) == ("accepted", INT8.label)
    engine = published_engine(place)
    assert isinstance(engine, LanguageEngine)
    assert engine.label == INT8.label


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"winner": "nobody"}, "winner is not among its candidates"),
        ({"winner": ""}, "its engine another one"),
        ({"delivered": None}, "its engine another one"),
        ({"schema_version": 99}, "schema version 99"),
        ({"more": 1}, "does not fit the schema"),
    ],
)
def test_a_language_report_that_does_not_hold_is_not_published(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    out = tmp_path / "out"
    write_language_out(out, tmp_path / "store")
    edit(lambda document: document.update(change))(out)
    with pytest.raises(StoreError) as error:
        publish(out, tmp_path / "reports" / "1", Folders(tmp_path))
    assert message in error.value.message


def test_a_damaged_engine_of_a_language_model_is_not_published(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_language_out(out, tmp_path / "store")
    (out / "engine" / "openvino_model.xml").write_bytes(b"enginE")
    with pytest.raises(StoreError, match="another digest"):
        publish(out, tmp_path / "reports" / "1", Folders(tmp_path))


def test_a_race_beside_serving_engines_proves_nothing(tmp_path: Path) -> None:
    report = doubted_language(sample_language_report(tmp_path / "store"))
    assert (report.verdict, report.winner) == ("unproven", INT8.label)
    assert report.reasons[-1] == CONTENDED.text
    rejected = report.model_copy(update={"verdict": "rejected"})
    assert doubted_language(rejected).verdict == "rejected"


def test_commands_for_engines_refuse_a_language_model(tmp_path: Path) -> None:
    write_language_out(tmp_path / "out", tmp_path / "store")
    with pytest.raises(ModelError, match="holds a language model, expected an engine"):
        load_engine(tmp_path / "out")


def test_the_routes_of_reports_answer_for_a_language_model(tmp_path: Path) -> None:
    write_language_out(tmp_path / "template", tmp_path / "template-store")

    async def story(desk: Desk) -> None:
        job = await desk.end_of("succeed")
        assert (job["state"], job["winner"]) == ("succeeded", INT8.label), job["failure"]
        get, at = desk.client.get, f"/reports/{job['id']}"
        whole = (await get(at)).json()
        assert (whole["kind"], whole["verdict"]) == ("language_model", "accepted")
        assert HOSTILE not in (await get(at, headers={"Accept": "text/html"})).text
        latency = (await get(f"{at}/latency")).json()
        assert (latency["prompt_tokens"], latency["output_tokens"]) == (128, 32)
        assert latency["baseline"]["answer"]["count"] == 8
        (candidate,) = latency["candidates"]
        assert (candidate["label"], candidate["ratio"]["value"]) == (INT8.label, 4.0)
        assert candidate["first_token_ms"] == pytest.approx(50)
        accuracy = (await get(f"{at}/accuracy")).json()
        assert accuracy["reference_perplexity"] == 12.5
        failures = [
            each["selection"]["failures"] if each["selection"] else each["failure"]
            for each in accuracy["candidates"]
        ]
        assert failures == [[], ["too rough"], f"no memory {HOSTILE}"]
        samples = json.loads(gzip.decompress((await get(f"{at}/samples")).content))
        assert [each["label"] for each in samples] == ["transformers fp32", INT8.label]
        assert (await get(f"{at}/engine.tar")).status_code == 200

    at_desk(tmp_path, story)


def test_the_pages_show_a_language_model(tmp_path: Path) -> None:
    write_language_out(tmp_path / "template", tmp_path / "template-store")

    async def story(desk: Desk) -> None:
        job = await desk.end_of("succeed")
        page = await desk.client.get(f"/ui/jobs/{job['id']}")
        assert page.status_code == 200
        for text in (f"{INT8.label} answers", "increase of perplexity", "128 tokens in, 32 out"):
            assert text in page.text
        assert page.text.count('class="point ') == 2, "the baseline and int8"
        assert 'id="entry-1"' in page.text
        assert "limit: 0.02" in page.text
        assert INT4.label in page.text
        assert HOSTILE not in page.text
        assert (await desk.client.get("/")).status_code == 200
        both = await desk.client.get(f"/ui/compare?a={job['id']}&b={job['id']}")
        assert both.status_code == 200
        assert "1.00 % (0.90 to 1.10 %)" in both.text
        assert "median answer at 128 tokens in, 32 out" in both.text

        # one of engines cannot be compared with it
        (tmp_path / "template").rename(tmp_path / "language")
        write_out(tmp_path / "template", tmp_path / "other-store")
        answer = await desk.compile("succeed", model=MODEL + b"\x08\x08")
        engines = await desk.until(answer.json()["id"], "succeeded")
        mixed = await desk.client.get(f"/ui/compare?a={job['id']}&b={engines['id']}")
        assert "expected two of one kind" in mixed.text

    at_desk(tmp_path, story)


def test_a_rejected_language_model_has_a_page_and_no_engine(tmp_path: Path) -> None:
    rejected = {"verdict": "rejected", "winner": "", "delivered": None, "baseline": None}
    write_language_out(
        tmp_path / "template",
        tmp_path / "template-store",
        headline="No candidate could be built.",
        candidates=(),
        validation=None,
        **rejected,
    )

    async def story(desk: Desk) -> None:
        job = await desk.end_of("succeed")
        assert (job["verdict"], job["winner"]) == ("rejected", None)
        page = await desk.client.get(f"/ui/jobs/{job['id']}")
        assert "No candidate could be built." in page.text
        answer = await desk.client.get(f"/reports/{job['id']}/engine.tar")
        assert answer.status_code == 404
        latency = (await desk.client.get(f"/reports/{job['id']}/latency")).json()
        assert (latency["baseline"], latency["candidates"]) == (None, [])

    at_desk(tmp_path, story)


def test_commands_show_and_download_a_language_model(tmp_path: Path) -> None:
    write_language_out(tmp_path / "template", tmp_path / "template-store")
    (tmp_path / "m.onnx").write_bytes(MODEL)
    (tmp_path / "plan.yaml").write_text("name: succeed")
    with serving(tmp_path) as server:
        env = {"CRUCIBLE_URL": server.url}
        sent = crucible(
            "submit", tmp_path / "m.onnx", "--plan", tmp_path / "plan.yaml", "--wait", env=env
        )
        assert sent.code == 0, sent.err
        assert f"{INT8.label} answers" in sent.out
        job = str(sent.summary["id"])
        shown = crucible("report", job, env=env)
        assert "perplexity" in shown.out, shown.err
        got = crucible("download", job, "--out", tmp_path / "mine", env=env)
        assert got.code == 0, got.err
        assert load_delivered(tmp_path / "mine" / "engine", LanguageEngine).label == INT8.label
        with Client(server.url) as client, pytest.raises(UserError, match="a language model"):
            client.report(job)
    (tmp_path / "mine" / "report.md").unlink()
    again = crucible("report", tmp_path / "mine")
    assert again.code == 0, again.err
    assert (tmp_path / "mine" / "report.md").is_file()


def test_the_form_of_the_pages_says_where_a_language_model_goes(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        files = {"model": ("tiny.gguf", b"GGUF")}
        answer = await desk.client.post("/ui/drafts", files=files)
        assert answer.status_code == 422
        assert "is a language model, which this form does not take" in answer.text

    at_desk(tmp_path, story)


def test_reading_a_report_of_engines_refuses_one_of_a_language_model(tmp_path: Path) -> None:
    report = sample_language_report(tmp_path / "store")
    (tmp_path / "report.json").write_text(report.model_dump_json())
    with pytest.raises(UserError, match="is the report of a language model, expected one of"):
        load_report(tmp_path)


def test_the_published_schema_is_in_step_and_a_report_fits_it(tmp_path: Path) -> None:
    published = (ROOT / "docs" / "reference" / "language-report.schema.json").read_text()
    assert published == language_schema(), "write it again: make reference"
    document = json.loads(sample_language_report(tmp_path).model_dump_json())
    jsonschema.validate(document, json.loads(published))
    del document["verdict"]
    with pytest.raises(jsonschema.ValidationError, match="'verdict' is a required property"):
        jsonschema.validate(document, json.loads(published))
