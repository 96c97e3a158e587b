"""What commands are given: the plan of their options, and the engine of an output folder."""

from __future__ import annotations

from pathlib import Path

from pipeline.api import read_plan
from pipeline.cli import terminal
from pipeline.core.artifacts import Engine
from pipeline.formatting import profiles_text
from pipeline.plan.schema import Plan
from pipeline.report import bundle as deliver


def delivered_engine(folder: Path) -> Engine:
    """Load the engine of an output folder, and verify its files.

    Print a note if the engine has no manifest to verify them against.
    """
    engine = deliver.load_engine(folder)
    if not deliver.has_manifest(engine):
        text = "note: this engine has no artifact.json, so changes of its files cannot be detected"
        console = terminal.console(stderr=True)
        console.print(f"{text}: compile the model again to have one", soft_wrap=True)
    return engine


def plan_from_options(path: Path, overrides: list[str], profiles: list[str]) -> Plan:
    """Read a plan, or make one for an ONNX model, with the values of --set and --profile."""
    if profiles:
        overrides = [*overrides, f"profiles={profiles_text(profiles)}"]
    return read_plan(path, overrides)
