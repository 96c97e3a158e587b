"""No path of the server's home reaches a client."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.execution.stage_event import StageEvent
from service.jobs.redact import scrub_file, scrubbed, scrubbed_event
from service.jobs.state import CancelAsked, Died, Failure
from service.storage.layout import Folders
from tests.pipeline.execution.figures import accuracy, candidate, latency

FOLDERS = Folders(Path("/srv/a&b/home"))
JOB = "01931f3a5b2c07d1e9a44c6f21"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"cannot read '/srv/a&b/home/uploads/{JOB}/model.onnx'", "cannot read 'model.onnx'"),
        (
            f"/srv/a&b/home/jobs/{JOB}/tmp/x, /srv/a&b/home/reports/{JOB}/report.json",
            "tmp/x, report.json",
        ),
        (f"<td>/srv/a&amp;b/home/uploads/{JOB}/model.onnx</td>", "<td>model.onnx</td>"),
        ("cannot use '/srv/a&b/home/crucible.db'", "cannot use '$CRUCIBLE_HOME/crucible.db'"),
        ("at /srv/a&b/home", "at $CRUCIBLE_HOME"),
        ("/srv/a&b/homes/x and /srv/a&b", "/srv/a&b/homes/x and /srv/a&b"),
    ],
)
def test_paths_of_the_home_become_names(text: str, expected: str) -> None:
    assert scrubbed(text, FOLDERS) == expected


def test_events_are_scrubbed_where_they_have_texts(tmp_path: Path) -> None:
    file = f"/srv/a&b/home/uploads/{JOB}/m"
    assert scrubbed_event(Died(Failure(code="c", message=file, next_step=file)), FOLDERS) == Died(
        Failure(code="c", message="m", next_step="m")
    )
    event = scrubbed_event(
        StageEvent("build", file, text=file, state="failed", seconds=2.0), FOLDERS
    )
    assert event == StageEvent("build", "m", text="m", state="failed", seconds=2.0)
    latency_there = replace(latency(), shape=file)
    figures = scrubbed_event(
        StageEvent(
            "benchmark",
            figures=candidate(file, accuracy(measure=file), latency_there),
            state="progress",
        ),
        FOLDERS,
    )
    assert isinstance(figures, StageEvent)
    assert figures.figures == candidate("m", accuracy(measure="m"), replace(latency(), shape="m"))
    assert scrubbed_event(CancelAsked(), FOLDERS) == CancelAsked()
    (tmp_path / "report.md").write_text(f"model: {file}\n")
    scrub_file(tmp_path / "report.md", FOLDERS)
    assert (tmp_path / "report.md").read_text() == "model: m\n"


def test_a_home_behind_a_link_is_found_by_both_names(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    text = scrubbed(
        f"{tmp_path}/link/uploads/{JOB}/a {tmp_path}/real/uploads/{JOB}/b",
        Folders(tmp_path / "link"),
    )
    assert text == "a b"
