"""The report that the tests of this folder share."""

import pytest

from pipeline.results.report import Report
from tests.builders.report import sample_report


@pytest.fixture(scope="module")
def report() -> Report:
    return sample_report()
