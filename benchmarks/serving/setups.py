"""What the CNN load is on each backend, and how Crucible serves it there."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from pipeline.core.artifacts import Engine
from service.registry.models import DeploymentOptions

Backend = Literal["onnxruntime", "tensorrt"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
OPTIONS = ("instances", "max_batch", "max_delay_s")
"""Of a deployment, for the command line and the document of a result."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The network, its image, and the options of its deployment. Precision is fp32, on the GPU
    without TF32.
    """

    backend: Backend
    document: str  # what the result is called
    cnn: str  # of torchvision
    side: int  # of the image that is sent
    enlarged: int  # times, inside the network
    options: DeploymentOptions
    most_per_s: float | None = (
        None  # rows that the engine alone may reach for the targets to be about it; None: any
    )

    @property
    def on_gpu(self) -> bool:
        """Then nothing is held against it but its own engine: the peers run ONNX Runtime on the
        CPU.
        """
        return self.backend == "tensorrt"

    def described(self) -> dict[str, str | float | int | None]:
        """For the document of a result."""
        options = self.options.model_dump(include=set(OPTIONS))
        return {
            "backend": self.backend,
            "cnn": self.cnn,
            "side": self.side,
            "enlarged": self.enlarged,
            **options,
        }


SETUPS: Mapping[Backend, Setup] = {
    "onnxruntime": Setup(
        "onnxruntime", "serving", "resnet18", 128, 1, DeploymentOptions(instances=1)
    ),  # 5 to 10 ms on 2 cores with AVX2
    "tensorrt": Setup(
        "tensorrt",
        "serving_gpu",
        "resnet50",
        128,
        7,
        DeploymentOptions(instances=1, max_batch=8, max_delay_s=0.05),
        most_per_s=500.0,
    ),
}
"""On the GPU the image is enlarged to 896: 131 GFLOP for 196 KB, so that it is not the copying that
is measured. As much as 16 images of 224, of which an H200 takes 5,150/s at batch 64 (12.4 ms): 320
rows/s, and one row fills the GPU, so that batch 8 is as good as 16. Batches are half of the 16
connections: one runs while the other comes together. The delay is twice the 25 ms of a batch: a
shorter one sends off parts of batches, which are padded to the sizes that are captured. An idle
engine waits for nobody, so that the latency of one does not grow.
"""


def setup_from(arguments: argparse.Namespace) -> Setup:
    """That of the backend, with what the command line says otherwise."""
    setup = SETUPS[arguments.backend]
    load = {name: getattr(arguments, name) for name in ("cnn", "side", "enlarged")}
    options = {name: getattr(arguments, name) for name in OPTIONS}
    given = {name: value for name, value in options.items() if value is not None}
    chosen = DeploymentOptions.model_validate(setup.options.model_dump() | given)
    document = (
        f"{setup.document}_instances" if (chosen.instances or 1) > 1 else setup.document
    )  # beside the run without, not in its place
    return replace(
        setup,
        **{name: value for name, value in load.items() if value is not None},
        options=chosen,
        document=document,
    )


def refuse_other_hosts(setup: Setup) -> None:
    """BackendUnavailable, which says what is missing and what to do, where this host cannot run the
    setup's engines.
    """
    if setup.on_gpu:
        from pipeline.backends.tensorrt import backend as tensorrt_

        tensorrt_.probe()


def ran_on(engine: Engine) -> str:
    """Backend, precision and device of an engine, as rows say it."""
    return (
        f"{engine.target.backend} {engine.target.version} {engine.recipe.precision} on"
        f" {engine.target.device}"
    )
