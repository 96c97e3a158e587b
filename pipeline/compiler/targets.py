"""Compile a plan for several targets, those that this host has, one after another."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

from pipeline.compiler.compile import compile_plan, publish_report
from pipeline.errors import CrucibleError
from pipeline.execution.stage_runner import Runner
from pipeline.host.gpu import VISIBLE, visible
from pipeline.host.labels import Labels, device_labels, labels_text
from pipeline.plan.schema import Plan, TargetConfig, plan_for_target
from pipeline.report.files import write_targets
from pipeline.results.targets import TargetResult, TargetsSummary, result_of_report


def compile_targets(
    plan: Plan,
    folder: Path,
    open_runner: Callable[[TargetConfig], AbstractContextManager[Runner]],
    command: str,
) -> TargetsSummary:
    """Compile for each target of the plan into a folder of its name, and write the summary.

    A target that this host lacks is `unavailable`, one with an error is `failed`, and the others
    are delivered.
    """
    labels, results = device_labels(), list[TargetResult]()
    for target in plan.targets:
        device = device_of(target, labels)
        if device is None:
            results.append(_without_report(target, "unavailable", _why(target, labels)))
            continue
        try:
            with only(device), open_runner(target) as runner:
                report = compile_plan(plan_for_target(plan, target), runner, command)
                files = publish_report(report, folder / target.title)
        except CrucibleError as error:
            results.append(_without_report(target, "failed", f"{error.message} ({error.code})"))
        else:
            where = str(files.html_file.relative_to(folder))
            results.append(result_of_report(target.title, target.requirement.text, report, where))
    created = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    summary = TargetsSummary(name=plan.name, created=created, targets=tuple(results))
    write_targets(summary, folder)
    return summary


def device_of(target: TargetConfig, labels: Mapping[str, Labels]) -> str | None:
    """Return the first device that fulfils a target; None if there is none."""
    required = target.requirement
    fitting = (name for name, each in labels.items() if not required.missing(name, each))
    return next(fitting, None)


@contextlib.contextmanager
def only(device: str) -> Iterator[None]:
    """Show this process and its children one GPU, or none for the CPU."""
    before = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = visible(device, before)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VISIBLE]
        else:
            os.environ[VISIBLE] = before


def _why(target: TargetConfig, labels: Mapping[str, Labels]) -> str:
    missing = {target.requirement.missing(*device) for device in labels.items()}
    parts = missing - {target.device} or missing
    texts = " or ".join(f"'{part}'" for part in sorted(parts))
    have = "; ".join(f"{name} ({labels_text(each)})" for name, each in labels.items())
    return f"this host lacks {texts}; it has {have}"


def _without_report(
    target: TargetConfig, outcome: Literal["unavailable", "failed"], reason: str
) -> TargetResult:
    return TargetResult(
        name=target.title, target=target.requirement.text, outcome=outcome, reason=reason
    )
