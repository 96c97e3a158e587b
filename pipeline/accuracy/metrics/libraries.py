"""The libraries of the built-in metrics, which the extra `metrics` installs."""

from __future__ import annotations

import importlib.util

from pipeline.distribution import install_command
from pipeline.errors import BackendUnavailable

LIBRARIES = {
    "f1": {"sklearn": "scikit-learn"},
    "map": {"pycocotools": "pycocotools"},
    "wer": {"jiwer": "jiwer"},
    "spearman": {"scipy": "scipy"},
    "sts": {"scipy": "scipy"},
}
"""Module and distribution that each metric needs."""


def check_libraries(metric: str) -> None:
    """Raise BackendUnavailable if the library of a metric is not installed."""
    for module, distribution in LIBRARIES.get(metric, {}).items():
        if importlib.util.find_spec(module) is None:
            raise BackendUnavailable(
                f"accuracy.metric is {metric}, which needs {distribution}: it is not installed",
                install_command("metrics"),
            )
