"""The generated files of docs/reference."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.llm.results import language_schema
from pipeline.plan.schema import Plan
from pipeline.report import files
from tests.docs import command_line, models, operations, programs

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def pages() -> dict[str, str]:
    """Every generated file by its name, as it is to be."""
    return {
        "cli.md": command_line.cli_page(),
        "plan.md": models.plan_page(),
        "language-plan.md": models.language_plan_page(),
        "plan.schema.json": json.dumps(Plan.model_json_schema(), indent=1) + "\n",
        "report.md": models.report_page(),
        "report.schema.json": files.schema(),
        "language-report.md": models.language_report_page(),
        "language-report.schema.json": language_schema(),
        "settings.md": models.settings_page(),
        "errors.md": operations.errors_page(),
        "metrics.md": operations.metrics_page(),
        "http.md": programs.http_page(),
        "grpc.md": programs.grpc_page(),
        "python.md": programs.python_page(),
    }
