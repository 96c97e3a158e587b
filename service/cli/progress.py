"""The output of `crucible wait` and similar commands: a job's stages while it runs, then its
result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import typer

from pipeline.cli import terminal
from pipeline.cli.stage_progress import StageProgress
from pipeline.execution.stage_event import StageEvent

if TYPE_CHECKING:
    from pipeline.results.targets import TargetResult
    from service.client import Client, Event, RemoteError
    from service.http.schemas import CompileView, JobView, TargetView


def print_job(client: Client, job: JobView, wait: bool, as_json: bool) -> None:
    """Print a new job, or follow it to its end."""
    if wait:
        follow(client, job.id, as_json)
    if not as_json:
        print(
            f"job {job.id} is {job.state}; follow it with `crucible wait"
            f" {client.url}{job.links.job}`"
        )
    print(job.model_dump_json())


def follow(client: Client, job_id: str, as_json: bool) -> NoReturn:
    """Show a job's events to its end, then its result. Ends the command with its exit code."""
    errors = terminal.console(stderr=True)
    with StageProgress(errors, quiet=as_json) as progress:
        for event in client.events(job_id):
            if event.kind == "stage":
                progress(stage_of(event))
            elif event.kind == "figures":
                progress(figures_of(event))
            elif not as_json:
                reason = event.data.get("why")
                errors.print(
                    f"{event.kind}: {reason}" if reason else event.kind,
                    highlight=False,
                    markup=False,
                )
    job = client.job(job_id)
    if job.state == "succeeded" and not as_json:
        _print_verdict(client, job)
    print(job.model_dump_json())
    if job.state != "succeeded":
        raise _error_of(job)
    raise typer.Exit(2 if job.verdict == "rejected" else 0)


def print_compile(client: Client, compiled: CompileView, wait: bool, as_json: bool) -> None:
    """Print a new compile for several targets, or follow all its jobs to their ends, and end the
    command with the exit code of the worst target.
    """
    from pipeline.results.targets import exit_code

    errors, told = terminal.console(stderr=True), dict[str, str]()
    for view in client.follow_compile(compiled.id) if wait else (compiled,):
        compiled = view
        for target in view.targets:
            text = _target_text(target)
            if told.get(target.name) != text and not as_json:
                errors.print(f"{target.name}: {text}", highlight=False, markup=False)
            told[target.name] = text
    if compiled.outcome is None:
        if not as_json:
            print(f"compile {compiled.id}: see it at {client.url}{compiled.link}")
        print(compiled.model_dump_json())
        return
    if not as_json:
        results = (_result_of(client, target) for target in compiled.targets)
        terminal.console().print(terminal.target_table(results))
    print(compiled.model_dump_json())
    raise typer.Exit(exit_code(compiled.outcome))


def _target_text(target: TargetView) -> str:
    """Return the state of a target's job, or its current stage."""
    job = target.job
    if job.state == "running" and job.progress is not None:
        return f"{job.progress.stage} {job.progress.subject}".strip()
    return f"{target.outcome or job.state} {job.waits_for_node}".strip()


def _result_of(client: Client, target: TargetView) -> TargetResult:
    from pipeline.results.targets import TargetResult, result_of_report

    job, address = target.job, f"{client.url}/reports/{target.job.id}"
    if job.state == "succeeded":
        return result_of_report(target.name, job.target, client.report(job.id), address)
    reason = job.failure.message if job.failure else ""
    assert target.outcome is not None  # all have ended
    return TargetResult(name=target.name, target=job.target, outcome=target.outcome, reason=reason)


def promote_text(model: str, job: JobView) -> str:
    """Say how the engine of a recompile becomes the next version of its model."""
    doubt = ""
    if job.verdict == "unproven":
        doubt = "; an unproven engine also needs --override"
    return f"make it the next version: `crucible promote {model} {job.id}`{doubt}"


def stage_of(event: Event) -> StageEvent:
    """Convert an event for the terminal. The stage's name comes from a job, so its markup is
    escaped.
    """
    from dataclasses import fields

    from rich.markup import escape

    known = {field.name for field in fields(StageEvent)}
    values = {name: value for name, value in event.data.items() if name in known}
    values["stage"] = escape(values["stage"])
    return StageEvent(**values)


def figures_of(event: Event) -> StageEvent:
    """Convert figures of a candidate for the terminal. Those of a form that a newer server sends
    are left out.
    """
    from pydantic import TypeAdapter, ValidationError

    from pipeline.core.progress import CandidateFigures

    try:
        figures = TypeAdapter(CandidateFigures).validate_python(event.data)
    except ValidationError:
        figures = None
    return StageEvent("", state="progress", figures=figures)


def _print_verdict(client: Client, job: JobView) -> None:
    from pipeline.results.report import Report

    console, report = terminal.console(), client.any_report(job.id)
    if not isinstance(report, Report):
        from pipeline.llm.render import accuracy_table, failures, speed_table

        tables = (accuracy_table(report), speed_table(report))
        place = f"{client.url}{job.links.report}"
        terminal.print_language_model(console, report, tables, failures(report), place)
        return
    if job.measures is None:
        console.print(terminal.candidate_table(report))
    else:
        terminal.print_latency(console, report)
    for line in terminal.verdict_lines(report):
        terminal.print_text(console, line)
    terminal.print_text(console, f"report: {client.url}{job.links.report}", markup=False)
    if job.recompiles is not None and report.has_engine:
        print(promote_text(job.recompiles.model, job))


def _error_of(job: JobView) -> RemoteError:
    from service.client import RemoteError

    if job.failure is None:
        return RemoteError(
            f"job {job.id} was cancelled", "submit it again if this was a mistake", "job.cancelled"
        )
    return RemoteError(job.failure.message, job.failure.next_step, job.failure.code)
