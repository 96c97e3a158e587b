"""The task metric where its scores say nothing; `stages/test_validate.py` holds the rest."""

import numpy as np
import pytest

from pipeline.errors import DataError
from pipeline.task_metric import TaskMetric


def test_an_output_without_a_row_per_sample_has_no_interval() -> None:
    metric = TaskMetric("cosine", "pooled", max_drop=0.1)
    metric.add(np.ones((1, 4), np.float32), None, np.ones((1, 4), np.float32))
    with pytest.raises(DataError, match="1 score for the whole set: output 'pooled' has no row per sample"):
        metric.result()


def exits(*arguments: object) -> object:
    raise SystemExit(3)


def test_a_users_function_that_returns_nothing_or_ends_the_process_is_named() -> None:
    for function, said in ((lambda *arguments: None, "returned None"), (exits, "failed: SystemExit: 3")):
        metric = TaskMetric("mine:f", "y", max_drop=0.1, function=function)
        metric.add(np.ones((2, 4), np.float32), None, np.ones((2, 4), np.float32))
        with pytest.raises(DataError, match=said):
            metric.result()
