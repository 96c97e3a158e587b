"""Commands on language models, for `crucible` of the same names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import typer

from pipeline.cli import terminal
from pipeline.cli.running import command_line, exit_code, open_runner
from pipeline.plan import files as config
from pipeline.report import bundle as deliver
from pipeline.results.report import ReportFiles


def language_document(plan: Path) -> dict[str, object] | None:
    """Return the parsed plan of a language model; None for another one."""
    from pipeline.llm.plan import is_language_plan

    if plan.suffix not in (".yaml", ".yml") or not plan.is_file():
        return None
    document = config.read_document(plan)
    return document if isinstance(document, dict) and is_language_plan(document) else None


def compile_language_model(
    plan: Path, document: dict[str, object], overrides: list[str], out: Path | None, as_json: bool
) -> NoReturn:
    """Compile a language model, print its table, and end with the exit code of the verdict."""
    from pipeline.llm import compile as language
    from pipeline.llm.plan import language_plan_from_document
    from pipeline.llm.render import accuracy_table, failures, publish, speed_table

    parsed = language_plan_from_document(document, plan.resolve().parent, plan.stem, overrides)
    folder = out or Path("crucible-out") / (parsed.name or "model")
    deliver.check_folder(folder)
    with open_runner(as_json, parsed.name) as runner:
        report = language.compile_language_model(parsed, runner, command_line())
        files = publish(report, folder)
    if not as_json:
        terminal.print_language_model(
            terminal.console(),
            report,
            (accuracy_table(report), speed_table(report)),
            failures(report),
            str(files.html_file),
        )
    summary = {
        "verdict": report.verdict,
        "winner": report.winner,
        "headline": report.headline,
        "reasons": report.reasons,
        **written(files, report.has_engine),
    }
    print(json.dumps(summary))
    raise typer.Exit(exit_code(report.verdict))


def written(files: ReportFiles, has_engine: bool) -> dict[str, object]:
    """Return where the results of a compile are, for its JSON document."""
    return {
        "reports": {
            "json": str(files.json_file),
            "markdown": str(files.markdown_file),
            "html": str(files.html_file),
        },
        "engine": str(files.folder / "engine") if has_engine else None,
    }
