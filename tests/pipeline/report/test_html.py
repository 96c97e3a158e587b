"""Reports as HTML: well formed, with one script only, and with every name as text."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.report.entries import entries
from pipeline.report.files import write_report
from pipeline.report.html import page
from pipeline.results.report import Report
from tests.builders.report import EVIL, proven_report, sample_report, without_graph


@pytest.fixture(scope="module")
def html_page(report: Report) -> str:
    return page(report)


class Structure(html.parser.HTMLParser):
    """Collects tags and ids, and checks that every element is closed in order."""

    VOID = frozenset({"meta", "link", "br", "path", "use", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for key, value in attrs if key == "id" and value]
        self.urls += [
            value for key, value in attrs if key in {"src", "href", "xlink:href"} and value
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def parsed(text: str) -> Structure:
    structure = Structure()
    structure.feed(text)
    return structure


def test_a_rejected_winner_is_not_shown_as_a_winner(report: Report) -> None:
    rejected = report.model_copy(update={"verdict": "rejected"})
    assert entries(rejected)[0].state == "measured"
    assert '<tr class="winner"' not in page(rejected)
    assert '<tr class="winner"' in page(report)


def test_the_page_is_well_formed_and_stands_alone(html_page: str) -> None:
    structure = parsed(html_page)
    assert structure.open == []
    assert "<script" not in without_graph(html_page)
    assert [url for url in structure.urls if not url.startswith("#")] == []
    assert re.findall(r"url\((?!#)", html_page) == []
    (policy,) = re.findall(r'"Content-Security-Policy" content="([^"]*)"', html_page)
    (script,) = re.findall(r"<script>(.*?)</script>", html_page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )


def test_ids_are_unique_though_each_figure_brings_its_own(html_page: str) -> None:
    structure = parsed(html_page)
    assert len(structure.ids) == len(set(structure.ids))
    assert {url.removeprefix("#") for url in structure.urls} <= set(structure.ids)


def test_figures_speak_to_screen_readers_and_stages_show_what_was_reused(html_page: str) -> None:
    assert html_page.count('role="img" aria-label="') == html_page.count("<svg") == 4
    assert "Pareto front" in html_page
    assert html_page.count('class="reused" style="width:') == 4
    assert html_page.count('class="ran" style="width:') == 4


@pytest.mark.parametrize("make", [sample_report, proven_report])
def test_names_from_a_model_are_text_everywhere(
    make: Callable[..., Report], tmp_path: Path
) -> None:
    evil = make(evil=EVIL)
    files = write_report(evil, tmp_path)
    written = files.html_file.read_text()
    assert "alert(" in written
    assert "<script" not in without_graph(written)
    assert parsed(written).open == []
    prose = "\n".join(
        line for line in files.markdown_file.read_text().splitlines() if not line.startswith("    ")
    )  # code is literal
    assert "alert(" in prose
    assert "<script" not in prose
    lines = prose.splitlines()
    tables = [line for line in lines if line.startswith("| ") and "alert" in line]
    assert tables
    assert all(
        len(re.split(r"(?<!\\)\|", line))
        == len(re.split(r"(?<!\\)\|", lines[lines.index(line) - 1]))
        for line in tables
    )
    assert json.loads(files.json_file.read_text())["command"] == evil.command
