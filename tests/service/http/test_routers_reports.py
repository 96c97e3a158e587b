"""Reports over HTTP: forms, parts, raw values, the engine; and what a hostile name in a model may
do.
"""

import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.errors import DamagedError
from pipeline.report.files import load_report
from pipeline.report.graph.view import script_source
from pipeline.report.html import page
from service.http.routers.reports import preferred
from service.http.schemas import FORMS
from service.submission.tar import size_of_tar, tar
from tests.builders.report import EVIL, without_graph
from tests.service.builders.app import Desk, at_desk


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("*/*", "application/json"),
        ("", "application/json"),
        ("application/json", "application/json"),
        ("text/markdown", "text/markdown"),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "text/html"),
        ("text/*;q=0.5, text/html", "text/html"),
        ("text/markdown;q=0.4, application/json;q=0.3", "text/markdown"),
        ("image/png", "application/json"),
        ("text/html;q=0, */*", "application/json"),
        ("text/html;q=nan, text/markdown;q=;;,,", "application/json"),
        (",;q=²,", "application/json"),
    ],
)
def test_the_form_that_a_client_likes_best(accept: str, form: str) -> None:
    assert preferred(accept, tuple(FORMS)) == form


def test_a_report_in_its_forms_and_parts(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        job = await desk.end_of("succeed")
        here = f"/reports/{job['id']}"
        folder = tmp_path / "reports" / job["id"]
        report = load_report(folder)
        for form, name in FORMS.items():
            answer = await desk.client.get(here, headers={"Accept": form})
            assert answer.content == (folder / name).read_bytes()
            assert answer.headers["content-type"].startswith(form)
            assert answer.headers["vary"] == "Accept"

        latency = (await desk.client.get(f"{here}/latency")).json()
        assert (latency["winner"], latency["ratio"]) == (
            report.winner,
            report.model_dump(mode="json")["ratio"],
        )
        measured = [candidate.benchmark for candidate in report.candidates if candidate.benchmark]
        assert [engine["label"] for engine in latency["candidates"]] == [
            benchmark.label for benchmark in measured
        ]
        first = measured[0].rows[0]
        shown = latency["candidates"][0]["rows"][0]
        assert shown["end_to_end"]["median_ms"] == pytest.approx(first.end_to_end.median_s * 1e3)
        assert shown["end_to_end"]["count"] == len(first.end_to_end.values_s)
        assert shown["sizes"] == first.sizes

        accuracy = (await desk.client.get(f"{here}/accuracy")).json()
        assert accuracy["reference"] == report.reference
        assert [candidate["state"] for candidate in accuracy["candidates"]] == [
            candidate.state for candidate in report.candidates
        ]
        assert accuracy["validation"] == json.loads(report.model_dump_json())["validation"]

        packed = await desk.client.get(f"{here}/samples")
        assert packed.headers["content-type"] == "application/gzip"
        raw = json.loads(gzip.decompress(packed.content))
        assert raw[0]["label"] == report.baseline.label  # type: ignore[union-attr]
        of_first = next(engine for engine in raw if engine["label"] == measured[0].label)
        assert tuple(of_first["rows"][0]["end_to_end"]["values_s"]) == first.end_to_end.values_s

        engine = await desk.client.get(f"{here}/engine.tar")
        assert int(engine.headers["content-length"]) == len(engine.content)
        with tarfile.open(fileobj=io.BytesIO(engine.content)) as archive:
            names = set(archive.getnames())
            assert names == {
                str(path.relative_to(folder))
                for path in (folder / "engine").rglob("*")
                if path.is_file()
            }

    at_desk(tmp_path, story)


def test_there_is_no_report_of_a_job_without_one(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        failed = await desk.end_of("fail")
        for part in ("", "/latency", "/accuracy", "/samples", "/engine.tar"):
            answer = await desk.client.get(f"/reports/{failed['id']}{part}")
            assert (
                answer.status_code,
                "is failed: there is no report" in answer.json()["error"],
            ) == (404, True)

    at_desk(tmp_path, story)


def test_a_node_named_as_a_script_does_nothing(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"

    async def story(desk: Desk) -> None:
        job = await desk.end_of("succeed")
        folder = tmp_path / "reports" / job["id"]
        report = load_report(folder)
        layered = report.model_copy(
            update={"reasons": (f"node '{evil}' lost accuracy", EVIL), "name": evil}
        )
        (folder / "report.html").write_text(page(layered, lambda plot: "<svg/>"))
        (folder / "sha256.json").unlink()
        answer = await desk.client.get(f"/reports/{job['id']}", headers={"Accept": "text/html"})
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in answer.text
        assert "<script" not in without_graph(answer.text)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith(
            "sandbox allow-scripts; default-src 'none';"
        )  # not allow-same-origin: no cookies, no answers of this service
        assert "allow-same-origin" not in policy
        assert policy.endswith(f"script-src {script_source()}")  # the page's own script only
        assert answer.headers["x-content-type-options"] == "nosniff"
        for path in ("", "/latency", "/accuracy"):
            assert (await desk.client.get(f"/reports/{job['id']}{path}")).headers[
                "content-type"
            ] == "application/json"

    at_desk(tmp_path, story)


def test_a_tar_is_what_tar_reads_with_long_names_and_odd_sizes(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    (folder / ("d" * 120)).mkdir(parents=True)
    sizes = {"empty": 0, "one": 1, "block": 512, f"{'d' * 120}/{'é' * 60}": 513}
    for name, size in sizes.items():
        (folder / name).write_bytes(b"x" * size)
    archive_bytes = b"".join(tar(folder))
    assert len(archive_bytes) == size_of_tar(folder)
    with tarfile.open(fileobj=io.BytesIO(archive_bytes)) as archive:
        assert {member.name: member.size for member in archive} == {
            f"engine/{name}": size for name, size in sizes.items()
        }
    assert archive_bytes == b"".join(tar(folder))


DAMAGES = [
    ("report.json", lambda file: file.write_bytes(file.read_bytes()[:-100]), "has another digest"),
    ("report.json", lambda file: file.unlink(), "'report.json' is missing"),
    ("sha256.json", lambda file: file.write_text("{"), "is damaged"),
    ("sha256.json", lambda file: file.write_text("[]"), "is damaged"),
    ("sha256.json", lambda file: file.write_text("{}"), "is damaged"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES)
def test_a_damaged_report_is_the_servers_fault(
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], object],
    message: str,
) -> None:
    async def story(desk: Desk) -> None:
        job = await desk.end_of("succeed")
        damage(tmp_path / "reports" / job["id"] / name)
        for part in ("", "/latency", "/accuracy", "/samples"):
            with capture_logs() as logged:
                answer = await desk.client.get(f"/reports/{job['id']}{part}")
            body = answer.json()
            assert (answer.status_code, body["code"]) == (500, "host.damaged")
            assert body["error"].startswith(f"the report of job {job['id']} is damaged: ")
            assert message in body["error"]
            assert body["next"].startswith("send the model again: the new job")
            (fault,) = [event for event in logged if event["event"] == "request.fault"]
            assert isinstance(fault["exc_info"], DamagedError)

    at_desk(tmp_path, story)


def test_a_report_of_an_earlier_version_is_shown_and_a_broken_one_is_not(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        job = await desk.end_of("succeed")
        folder = tmp_path / "reports" / job["id"]
        (folder / "sha256.json").unlink()
        for form in FORMS:
            answer = await desk.client.get(f"/reports/{job['id']}", headers={"Accept": form})
            assert answer.status_code == 200
        content = (folder / "report.json").read_bytes()
        for broken in (content[:-100], b"", b"[]", b'{"schema_version": 99}'):
            (folder / "report.json").write_bytes(broken)
            for part in ("", "/latency"):
                answer = await desk.client.get(f"/reports/{job['id']}{part}")
                assert (answer.status_code, answer.json()["code"]) == (500, "host.damaged")
                assert answer.json()["error"].endswith("is damaged: 'report.json' cannot be read")

    at_desk(tmp_path, story)


def test_a_damaged_engine_is_not_given(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        job = await desk.end_of("succeed")
        folder = tmp_path / "reports" / job["id"] / "engine"
        (folder / "model.onnx").write_bytes(b"enginE")
        answer = await desk.client.get(f"/reports/{job['id']}/engine.tar")
        start = f"the engine of job {job['id']} is damaged: 'model.onnx' has another digest"
        assert (answer.status_code, start in answer.json()["error"]) == (500, True)
        shutil.rmtree(folder)
        answer = await desk.client.get(f"/reports/{job['id']}/engine.tar")
        assert (answer.status_code, "is missing" in answer.json()["error"]) == (500, True)

    at_desk(tmp_path, story)


@pytest.mark.parametrize("name", ["report.html", "engine/model.onnx", "plan.json"])
def test_an_equal_request_makes_a_damaged_report_again(tmp_path: Path, name: str) -> None:
    async def story(desk: Desk) -> None:
        first = await desk.end_of("succeed")
        assert (await desk.compile("succeed")).json()["id"] == first["id"]
        place = tmp_path / ("uploads" if name == "plan.json" else "reports") / first["id"] / name
        place.write_bytes(b"other")
        again = await desk.end_of("succeed")
        assert (again["id"] != first["id"], again["state"]) == (True, "succeeded")
        assert (await desk.client.get(f"/reports/{again['id']}")).status_code == 200
        assert (await desk.compile("succeed")).json()["id"] == again["id"]
        assert (await desk.client.get(f"/jobs/{first['id']}")).json()["state"] == "succeeded"

    at_desk(tmp_path, story)
