"""`crucible report DIR --open`, with a browser that notes the address."""

import sys
from pathlib import Path

import pytest

from pipeline.report.files import write_report
from tests.builders.cli import crucible
from tests.builders.report import sample_report

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="other systems find their browsers elsewhere"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_report(sample_report(), tmp_path)
    return tmp_path


def test_the_report_opens_in_the_browser(folder: Path) -> None:
    browser = folder / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {folder}/opened\n')
    browser.chmod(0o755)
    result = crucible(
        "report", folder, "--open", "--json", env={"DISPLAY": ":0", "BROWSER": str(browser)}
    )
    assert (result.code, result.err) == (0, "")
    assert (folder / "opened").read_text() == f"{(folder / 'report.html').as_uri()}\n"


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"DISPLAY": "", "WAYLAND_DISPLAY": ""}, "this host has no display"),
        ({"DISPLAY": ":0", "BROWSER": "", "PATH": "/nowhere"}, "this host has no browser"),
    ],
)
def test_where_it_cannot_open_the_path_and_the_reason_are_printed(
    folder: Path, env: dict[str, str], reason: str
) -> None:
    result = crucible("report", folder, "--open", env=env)
    assert result.code == 0
    assert reason in result.err
    assert str(folder / "report.html") in result.err


def test_the_report_of_a_job_must_be_downloaded_first() -> None:
    result = crucible("report", "http://127.0.0.1:9/reports/x", "--open")
    assert result.code == 1
    assert "--open needs a folder" in result.err
    assert "crucible download http://127.0.0.1:9/reports/x" in result.err
