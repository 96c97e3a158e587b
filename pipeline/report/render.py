"""Writes a report: report.json for machines, report.md for a terminal or a pull request,
report.html for people.

The HTML file stands alone: no script, no network, plots inline. Names in a model and texts in a
report are untrusted: everything is escaped unless it was made by `_element`, and the page's own
policy forbids scripts and loading.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path
from string import Template

from pydantic import ValidationError

from pipeline.errors import UserError
from pipeline.formatting import date
from pipeline.report import sensitivity as layer_errors
from pipeline.report.drawing import Plot
from pipeline.report.figures import plots
from pipeline.report.outline import Bar, Section, Table
from pipeline.report.sections import headline, sections
from pipeline.results.report import SCHEMA_VERSION, Report, ReportFiles

JSON_NAME, MARKDOWN_NAME, HTML_NAME = "report.json", "report.md", "report.html"
FIGURES = "figures"  # each figure as a file of its own too


def write_report(report: Report, folder: Path) -> ReportFiles:
    """Write the three files, each atomically. The JSON comes last: where it is, the others are
    complete.
    """
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)
    files = ReportFiles(
        folder=folder,
        json_file=folder / JSON_NAME,
        markdown_file=folder / MARKDOWN_NAME,
        html_file=folder / HTML_NAME,
    )
    _write(files.html_file, page(report, partial(_drawn, folder / FIGURES)))
    _write(files.markdown_file, markdown(report))
    _write(files.json_file, report.model_dump_json(indent=1))
    return files


def load_report(place: Path) -> Report:
    """The report of a folder, or of its report.json. Raises UserError if there is none or another
    version wrote it.
    """
    file = place / JSON_NAME if place.is_dir() else place
    if not file.is_file():
        raise UserError(
            f"no report at '{file}'",
            "give the folder that `crucible compile` named, or the report.json in it",
        )
    return report_from_json(file.read_bytes(), str(file), file.parent)


def report_from_json(text: bytes, where: str, folder: Path) -> Report:
    """The report of a report.json; `where` is for messages, engines lie in `folder`. Raises
    UserError if it is none or another version wrote it.
    """
    try:
        document = json.loads(text)
        version = document["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"'{where}' is not a report: {error}",
            "give the report.json that `crucible compile` wrote",
        ) from error
    if version != SCHEMA_VERSION:
        raise UserError(
            f"'{where}' has schema version {version}, this Crucible reads {SCHEMA_VERSION}",
            "compile again with this version",
        )
    candidates = document.get("candidates")
    for candidate in candidates if isinstance(candidates, list) else ():
        if isinstance(candidate, dict) and isinstance(candidate.get("engine"), dict):
            candidate["engine"]["root"] = str(
                folder
            )  # an artifact's folder is no part of its content
    if isinstance(document.get("delivered"), dict):
        document["delivered"]["root"] = str(folder)
    try:
        return Report.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise UserError(
            f"'{where}' does not fit the schema: {error}",
            "compile again; docs/report.schema.json is the schema",
        ) from error


def schema() -> str:
    """The JSON schema of report.json, as published in docs/report.schema.json."""
    return json.dumps(Report.model_json_schema(mode="serialization"), indent=1) + "\n"


def _write(file: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise


def all_sections(report: Report) -> tuple[Section, ...]:
    """Every section; which layers hurt stands behind the rescue that looked."""
    found = sections(report)
    errors = layer_errors.section(report)
    place = 1 + next((index for index, each in enumerate(found) if each.key == "rescue"), -1)
    return (*found[:place], errors, *found[place:]) if errors.tables else found


# -- Markdown
# ------------------------------------------------------------------------------


def markdown(report: Report) -> str:
    """The report as GitHub-flavoured Markdown, without plots."""
    lines = [
        f"# {_md(report.name or 'Report')}: {report.verdict}",
        "",
        f"**{_md(headline(report))}**",
        "",
    ]
    lines += _md_list("Why", report.reasons)
    lines += _md_list("Next", report.next_steps)
    if report.nearest_miss:
        lines += [f"Nearest miss: {_md(report.title_of(report.nearest_miss))}", ""]
    for section in all_sections(report):
        lines += [f"## {section.title}", ""]
        for paragraph in section.paragraphs:
            lines += [_md(paragraph), ""]
        lines += _md_list("", section.items)
        if section.code:
            lines += [*(f"    {line}" for line in section.code.splitlines()), ""]
        for table in section.tables:
            lines += [f"{_md(table.folded)}:", ""] if table.folded and table.rows else []
            lines += [*_md_table(table), ""]
    return "\n".join(lines).rstrip() + "\n"


def _md_list(title: str, items: tuple[str, ...]) -> list[str]:
    return [
        *([f"{title}:", ""] if title and items else []),
        *(f"- {_md(item)}" for item in items),
        *([""] if items else []),
    ]


def _md_table(table: Table) -> list[str]:
    if not table.rows:
        return []
    ruler = ["---:" if name.startswith(">") else "---" for name in table.header]
    lines = [[_md(name.removeprefix(">")) for name in table.header], ruler]
    for index, row in enumerate(table.rows):
        cells = [_md(cell) for cell in row]
        lines.append(
            [f"**{cell}**" if cell and index == table.emphasised else cell for cell in cells]
        )
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def _md(text: str) -> str:
    """Plain text for Markdown: nothing in it is markup."""
    escaped = html.escape(" ".join(text.split()), quote=False)
    return "".join(f"\\{char}" if char in "\\|*`[]~" else char for char in escaped)


# -- HTML
# ------------------------------------------------------------------------------


class Html(str):
    """Text that is markup already; every other string is escaped."""

    __slots__ = ()


def _drawn(folder: Path, plot: Plot) -> str:
    """The figure from its file if that shows the same values, else drawn anew."""
    file, mark = folder / f"{plot.name}.svg", f"<!-- {plot.key} -->\n"
    if file.is_file() and (text := file.read_text(encoding="utf-8", errors="replace")).startswith(
        mark
    ):
        return text.removeprefix(mark)
    svg = plot.draw()
    _write(file, mark + svg)
    return svg


def page(report: Report, svg_of: Callable[[Plot], str] = lambda plot: plot.draw()) -> str:
    """The report as one HTML file that needs nothing else."""
    figures: dict[str, list[Html]] = {}
    for plot in (*plots(report), *layer_errors.plots(report)):
        drawing = _element("div", Html(svg_of(plot)), cls="plot", role="img", label=plot.caption)
        figures.setdefault(plot.section, []).append(
            _element("figure", drawing, _element("figcaption", plot.caption))
        )
    found = all_sections(report)
    body = [
        _banner(report),
        _contents(found),
        *(_section(section, figures.get(section.key, [])) for section in found),
    ]
    template = Template(
        resources.files("pipeline.report")
        .joinpath("templates", "report.html")
        .read_text(encoding="utf-8")
    )
    title = _escape(f"{report.name or 'Report'}: {report.verdict}")
    footer = _escape(
        f"Written by Crucible, {date(report.created)}. Raw values: report.json, schema version"
        f" {report.schema_version}."
    )
    return template.substitute(title=title, body="\n".join(body), footer=footer)


def _banner(report: Report) -> Html:
    parts = [
        _element("p", report.verdict, cls="verdict"),
        _element("h1", report.name or "Report"),
        _element("p", headline(report), cls="headline"),
        _bullets("Why", report.reasons),
        _bullets("What to do next", report.next_steps),
    ]
    if report.nearest_miss:
        parts.append(_element("p", f"Nearest miss: {report.title_of(report.nearest_miss)}"))
    return _element("header", *parts, cls=f"banner {report.verdict}")


def _bullets(title: str, items: tuple[str, ...]) -> Html:
    if not items:
        return Html("")
    heading = [_element("p", title, cls="list-title")] if title else []
    return Html("".join([*heading, _element("ul", *(_element("li", item) for item in items))]))


def _contents(found: tuple[Section, ...]) -> Html:
    links = [Html(f'<a href="#{section.key}">{_escape(section.title)}</a>') for section in found]
    return _element("nav", *links, label="Sections")


def _section(section: Section, figures: list[Html]) -> Html:
    text = [_element("p", paragraph) for paragraph in section.paragraphs]
    code = [_element("pre", _element("code", section.code))] if section.code else []
    shown = [_table(table) for table in section.tables if table.rows and not table.folded]
    folded = [
        _element("details", _element("summary", table.folded), _table(table))
        for table in section.tables
        if table.rows and table.folded
    ]
    heading = _element("h2", section.title)
    return _element(
        "section",
        heading,
        *text,
        _bullets("", section.items),
        *code,
        *shown,
        *figures,
        *folded,
        ident=section.key,
    )


def _table(table: Table) -> Html:
    numeric = [name.startswith(">") for name in table.header]
    head = [
        _cell("th", name.removeprefix(">"), right)
        for name, right in zip(table.header, numeric, strict=True)
    ]
    if table.bars:
        head.append(Html('<th class="bar"></th>'))
    body = []
    for index, row in enumerate(table.rows):
        cells = [_cell("td", cell, right) for cell, right in zip(row, numeric, strict=True)]
        if table.bars:
            cells.append(_bar(table.bars[index]))
        body.append(_element("tr", *cells, cls="winner" if index == table.emphasised else ""))
    grid = _element("table", _element("thead", _element("tr", *head)), _element("tbody", *body))
    return Html(f'<div class="scroll" tabindex="0">{grid}</div>')  # a keyboard can scroll it


def _bar(bar: Bar) -> Html:
    parts = [
        f'<span class="{name}" style="width:{100 * share:.2f}%"></span>'
        for name, share in (("ran", bar.ran), ("reused", bar.reused))
        if share
    ]
    return Html(f'<td class="bar"><div>{"".join(parts)}</div></td>')


def _cell(name: str, text: str, right: bool) -> Html:
    return _element(name, text, cls="number" if right else "")


def _element(
    name: str, *children: str, cls: str = "", role: str = "", label: str = "", ident: str = ""
) -> Html:
    """One element; children that are not Html are escaped, and so are attributes."""
    attributes = {"class": cls, "role": role, "aria-label": label, "id": ident}
    opened = "".join(f' {key}="{_escape(value)}"' for key, value in attributes.items() if value)
    return Html(f"<{name}{opened}>{''.join(_escape(child) for child in children)}</{name}>")


def _escape(text: str) -> str:
    return text if isinstance(text, Html) else html.escape(text, quote=True)
