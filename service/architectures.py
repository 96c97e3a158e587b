"""The architectures that a client may name for its safetensors weights, and the metrics. All names
are the service's own; no code comes from the client.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Callable
from typing import Any

from pipeline.distribution import install_command
from pipeline.plan.schema import METRICS, AccuracyConfig
from service.errors import Unprocessable

ARCHITECTURES = (
    "resnet18",
    "resnet50",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "convnext_tiny",
    "vit_b_16",
)
"""Functions of torchvision.models; the service can load weights for these."""

MAX_CLASSES = 1_000_000
FUNCTION = re.compile(rf"({'|'.join(ARCHITECTURES)})_of_([1-9][0-9]*)")


def entrypoint_of(name: str, classes: int) -> str:
    """Return the entrypoint of a named architecture. Unprocessable suggests the nearest name if the
    architecture is unknown.
    """
    if name not in ARCHITECTURES:
        suggestions = difflib.get_close_matches(name, ARCHITECTURES, n=1)
        known = ", ".join(ARCHITECTURES)
        raise Unprocessable(
            f"no architecture '{name}'",
            f"did you mean {suggestions[0]}? known: {known}"
            if suggestions
            else f"known: {known}; or send ONNX",
        )
    if not 0 < classes <= MAX_CLASSES:
        raise Unprocessable(
            f"classes: {classes}, expected 1 to {MAX_CLASSES}",
            "give the number of outputs that the weights were trained with",
        )
    packages = ("torch", "torchvision", "safetensors")
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        message = f"architectures need {', '.join(missing)}, which is not installed on this server"
        command = install_command("torch")
        raise Unprocessable(message, f"send ONNX, or install the extra on the server: {command}")
    return f"service.architectures:{name}_of_{classes}"


def check_functions(options: AccuracyConfig) -> None:
    """Raise Unprocessable if the metric or its decoder is code of the client."""
    for key, name in options.functions.items():
        raise Unprocessable(
            f"{key} is '{name}', and this service runs no code of its clients",
            f"choose a built-in one (metrics: auto, {', '.join(METRICS)}); with one of your own,"
            " run `crucible compile` on your machine",
        )


def __getattr__(function: str) -> Callable[[], Any]:
    """Return a factory for `resnet50_of_10`, as `entrypoint_of` names it: the architecture with
    that number of classes.
    """
    match = FUNCTION.fullmatch(function)
    if match is None:
        raise AttributeError(f"module 'service.architectures' has no attribute '{function}'")

    def build() -> Any:
        import torchvision.models

        return getattr(torchvision.models, match[1])(num_classes=int(match[2]))

    return build
