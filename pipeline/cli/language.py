"""Commands on language models: compile, validate and bench, for `crucible` of the same names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from pipeline.cli import terminal
from pipeline.cli.running import command_line, exit_code, open_runner
from pipeline.errors import ModelError, PlanError, UserError
from pipeline.plan import files as config
from pipeline.report import bundle as deliver
from pipeline.results.report import ReportFiles, Verdict

if TYPE_CHECKING:
    from pipeline.llm.engine import LanguageEngine
    from pipeline.llm.plan import LanguagePlan
    from pipeline.llm.results import LanguageReport
    from pipeline.llm.speed.race import Race

MEASURING_TIME = ("benchmark.budget_s",)


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


def validate_language_model(result: Path, overrides: list[str], as_json: bool) -> NoReturn:
    """Score a delivered engine again, and end with 0 if it passes, else with 2."""
    from pipeline.llm.remeasure.reopened import override_language_plan
    from pipeline.llm.remeasure.scores import validate_again

    engine, report = _delivered(result)
    plan = override_language_plan(report.plan, overrides)
    with open_runner(as_json, plan.name) as runner:
        again = validate_again(report, plan, engine, runner)
    if not as_json:
        _print_lines(terminal.language_score_lines(again), markup=True)
    document = again.model_dump(mode="json") | {
        "perplexity": again.perplexity,
        "passed": again.judged.passed,
    }
    print(json.dumps(document))
    raise typer.Exit(0 if again.judged.passed else 2)


def bench_language_model(
    result: Path,
    overrides: list[str],
    against: Path | None,
    others: Mapping[str, object],
    as_json: bool,
) -> None:
    """Time a delivered engine again. `others`: options of `crucible bench` that are for other
    engines, with their values.
    """
    from pipeline.llm.remeasure import times
    from pipeline.llm.remeasure.reopened import override_language_plan

    if given := [name for name, value in others.items() if value]:
        raise PlanError(
            f"{', '.join(given)}: not for '{result}', a language model",
            "set its request: --set benchmark.concurrency=[1,4] --set benchmark.prompt_tokens=256",
        )
    engine, report = _delivered(result)
    plan = override_language_plan(report.plan, overrides)
    one, other = times.Delivered(engine.label, report, engine), None
    if against is not None:
        one = times.Delivered(f"{engine.label} ({result})", report, engine)
        engine_of_other, report_of_other = _delivered(against)
        name = f"{engine_of_other.label} ({against})"
        other = times.Delivered(name, report_of_other, engine_of_other)
        if other.name == one.name:
            raise PlanError(
                f"--against names '{against}', which is measured already", "name another folder"
            )
    completes = (
        other is None
        and all(override.partition("=")[0] in MEASURING_TIME for override in overrides)
        and times.lacks_ratio(report)
    )
    with open_runner(as_json, plan.name) as runner:
        race, renewed = times.benchmark_again(one, plan, runner, other), None
        if completes:
            renewed = times.renewed_report(report, race, runner.steps, command_line())
    document = _show(race, plan, as_json)
    if renewed and (ratio := race.rows[-1].ratio):
        _complete(renewed, report.verdict, result if result.is_dir() else result.parent, as_json)
        document |= {"verdict": renewed.verdict, "ratio": ratio.model_dump()}
    print(json.dumps(document))


def _delivered(folder: Path) -> tuple[LanguageEngine, LanguageReport]:
    """Load the engine of an output folder, verify its files, and read its report."""
    from pipeline.llm.engine import LanguageEngine
    from pipeline.llm.results import LanguageReport, load_any_report

    if not deliver.holds_language_model(folder):
        raise ModelError(
            f"no language model in '{folder}'",
            "give the folder that `crucible compile --out` wrote",
        )
    engine, report = deliver.load_delivered(folder, LanguageEngine), load_any_report(folder)
    if not isinstance(report, LanguageReport):
        raise UserError(
            f"the report in '{folder}' is of engines, and its engine is a language model",
            "compile the language model into a folder of its own",
        )
    return engine, report


def _show(race: Race, plan: LanguagePlan, as_json: bool) -> dict[str, object]:
    """Print a run, and return it as JSON."""
    from pipeline.llm.render import missing_times, roofline_table, times_table

    if not as_json:
        console = terminal.console()
        console.print(terminal.rich_table(times_table(race.rows, plan.objective)))
        console.print(terminal.rich_table(roofline_table(race.rows)))
        _print_lines([line for row in race.rows[1:] for line in missing_times(row)])
    # thousands of times
    left_out = None if as_json else {"levels": {"__all__": {"round"}}}
    return {
        "prompt_tokens": race.prompt_tokens,
        "output_tokens": race.output_tokens,
        "engines": [row.model_dump(mode="json", exclude=left_out) for row in race.rows],
        "load_1min": race.load_1min,
    }


def _complete(renewed: LanguageReport, before: Verdict, folder: Path, as_json: bool) -> None:
    """Replace a report without a ratio, and its engine, by one that has a ratio now."""
    from pipeline.llm.render import publish

    publish(renewed, folder)
    lines = [
        f"{renewed.verdict.upper()}  {renewed.headline}",
        f"the report in {folder} was {before} because its ratio could not be measured; this"
        " run measured the ratio and replaced the report",
    ]
    if renewed.delivered is None:
        lines.append(
            f"the engine in {folder} is withdrawn: the model as it is is faster; next: compile the"
            " plan again with other candidates"
        )
    if not as_json:
        _print_lines(lines)


def _print_lines(lines: Sequence[str], markup: bool = False) -> None:
    for line in lines:
        terminal.console().print(line, highlight=False, soft_wrap=True, markup=markup)
