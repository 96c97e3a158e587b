"""Labels: what is known of each device of this host, for targets that ask for it.

{"cpu": {"name": "AMD EPYC 9654", "threads": "8", "avx512_vnni": "", "onnxruntime": "1.23.2"},
 "gpu:0": {"name": "NVIDIA H200", "threads": "8", "driver": "570.86", "tensorrt": "10.9.0"}}
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.host.environment import environment
from pipeline.host.gpu import find_gpus

Labels = Mapping[str, str]
"""By name: a version, a number or a text; "" for what a device has or has not."""

BACKENDS = ("onnxruntime", "openvino", "torch", "tensorrt")


def device_labels() -> dict[str, dict[str, str]]:
    """Return the labels of each device of this host, by its name: "cpu", "gpu:0", ...

    Imports no heavy library and makes no CUDA context.
    """
    host = environment()
    # TensorRT's package is named after its CUDA, too
    packages = {name.partition("-cu")[0]: version for name, version in host.packages.items()}
    versions = {name: packages[name] for name in BACKENDS if name in packages}
    shared = {"threads": str(host.cores), **versions}
    labels = {"cpu": {"name": host.cpu, **shared, **dict.fromkeys(host.cpu_flags, "")}}
    for number, gpu in enumerate(find_gpus().devices):
        labels[f"gpu:{number}"] = {
            "name": gpu.name,
            **shared,
            "driver": gpu.driver,
            "compute_capability": gpu.compute_capability,
        }
    return labels


def labels_text(labels: Labels) -> str:
    """Return labels for people: `NVIDIA H200, threads 8, driver 570.86`."""
    texts = (
        value if name == "name" else f"{name} {value}".strip() for name, value in labels.items()
    )
    return ", ".join(texts)
