"""A report as GitHub-flavoured Markdown, without figures."""

from __future__ import annotations

import html
from dataclasses import replace

from pipeline.report.sections import headline, sections
from pipeline.report.tables import Section, Table
from pipeline.results.report import Report

SPECIAL = "\\|*`[]~"  # characters that are markup


def markdown(report: Report) -> str:
    """Render the whole report."""
    lines = [
        f"# {escape(report.name or 'Report')}: {report.verdict}",
        "",
        f"**{escape(headline(report))}**",
        "",
    ]
    if report.reasons:
        lines += ["Why:", "", *_list_lines(report.reasons)]
    if report.next_steps:
        lines += ["Next:", "", *_list_lines(report.next_steps)]
    if report.nearest_miss:
        lines += [f"Nearest miss: {escape(report.title_of(report.nearest_miss))}", ""]
    for section in sections(report):
        lines += section_lines(section)
    return "\n".join(lines).rstrip() + "\n"


def section_lines(section: Section) -> list[str]:
    """Render one section with its heading."""
    lines = [f"## {section.title}", ""]
    for paragraph in section.paragraphs:
        lines += [escape(paragraph), ""]
    if section.items:
        lines += _list_lines(section.items)
    if section.code:
        lines += [f"    {line}" for line in section.code.splitlines()]
        lines.append("")
    for table in section.tables:
        lines += [*_titled_lines(table), ""]
    return lines


def _titled_lines(table: Table) -> list[str]:
    count = len(table.rows) if table.text_rows is None else min(table.text_rows, len(table.rows))
    lines = table_lines(replace(table, rows=table.rows[:count]))
    if not lines or not table.title:
        return lines
    part = f" (the first {count} of {len(table.rows)})" if count < len(table.rows) else ""
    return [f"{escape(table.title)}{part}:", "", *lines]


def _list_lines(items: tuple[str, ...]) -> list[str]:
    return [*(f"- {escape(item)}" for item in items), ""]


def table_lines(table: Table) -> list[str]:
    """Render one table without its title; nothing for a table without rows."""
    if not table.rows:
        return []
    lines = [
        [escape(column.title) for column in table.columns],
        ["---:" if column.align == "right" else "---" for column in table.columns],
    ]
    for index, row in enumerate(table.rows):
        cells = [escape(cell) for cell in row]
        if index == table.emphasised:
            cells = [f"**{cell}**" if cell else "" for cell in cells]
        lines.append(cells)
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def escape(text: str) -> str:
    """Escape plain text, so that nothing in it is markup."""
    escaped = html.escape(" ".join(text.split()), quote=False)
    return "".join(f"\\{char}" if char in SPECIAL else char for char in escaped)
