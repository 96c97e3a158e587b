"""`crucible compile`: a model, a language model, or one model for several targets."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import NoReturn

import typer

from pipeline.cli import language, terminal
from pipeline.cli.inputs import plan_from_options
from pipeline.cli.options import JsonOption, OutOption, PlanArgument, ProfileOption, SetOption
from pipeline.cli.running import command_line, exit_code, open_runner
from pipeline.errors import PlanError
from pipeline.execution.stage_runner import Runner
from pipeline.plan.schema import Plan, TargetConfig
from pipeline.report import bundle as deliver


def compile_(
    plan: PlanArgument,
    overrides: SetOption,
    profiles: ProfileOption,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build, check and measure engines for a model, and keep the best.

    Every candidate (a backend with a precision) is built, checked for accuracy on your data and
    measured side by side with the baseline. The output ends with a table of candidates, the
    verdict, the path of the HTML report and, as the last line, one JSON document.

    A plan with `language_model` compiles a decoder language model, checked on your texts.

    A plan with `targets` is compiled for each one that this host has, in a folder of its name, and
    the output ends with a table of the targets. The exit code is that of the worst.

    Exit codes: 0 accepted, keep or unproven; 2 rejected; 1 error in the plan or on this host.

    Example: crucible compile plan.yaml --set benchmark.duration_s=10
    """
    from pipeline.compiler.compile import compile_plan, publish_report

    if (document := language.language_document(plan)) is not None:
        if profiles:
            raise PlanError("--profile is not for language models", "set `context` in the plan")
        language.compile_language_model(plan, document, overrides, out, as_json)
    parsed = plan_from_options(plan, overrides, profiles)
    folder = out or Path("crucible-out") / (parsed.name or "model")
    deliver.check_folder(folder)
    if parsed.targets:
        _compile_targets(parsed, folder, as_json)
    with open_runner(as_json, parsed.name) as runner:
        report = compile_plan(parsed, runner, command_line())
        files = publish_report(report, folder)
    if not as_json:
        terminal.print_compiled(terminal.console(), report, files.html_file)
    summary: dict[str, object] = {
        "verdict": report.verdict,
        "winner": report.winner,
        "ratio": report.ratio.model_dump() if report.ratio else None,
    }
    if report.ratio is None:
        summary["ratio_missing"] = report.ratio_missing
    summary |= {"reasons": report.reasons, **language.written(files, report.has_engine)}
    print(json.dumps(summary))
    raise typer.Exit(exit_code(report.verdict))


def _compile_targets(plan: Plan, folder: Path, as_json: bool) -> NoReturn:
    """Compile for each target, print all side by side, and end with the exit code of the worst."""
    from pipeline.compiler.targets import compile_targets
    from pipeline.report.files import TARGETS_HTML
    from pipeline.results import targets

    errors = terminal.console(stderr=True)

    def runner_of(target: TargetConfig) -> contextlib.AbstractContextManager[Runner]:
        deliver.check_folder(folder / target.title)
        if not as_json:
            errors.print(f"target {target.title}", highlight=False)
        return open_runner(as_json, plan.name)

    summary = compile_targets(plan, folder, runner_of, command_line())
    if not as_json:
        terminal.console().print(terminal.target_table(summary.targets))
        print(f"report: {folder / TARGETS_HTML}")
    print(summary.model_dump_json())
    outcomes = [target.outcome for target in summary.targets]
    raise typer.Exit(targets.exit_code(targets.worst(outcomes)))
