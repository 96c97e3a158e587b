"""A plan of a model as it is given."""

from pathlib import Path

import pytest

from pipeline.plan.files import plan_from_document
from pipeline.plan.schema import Plan


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_from_document({"model": {"path": "m.onnx"}}, tmp_path)
