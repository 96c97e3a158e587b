"""Metadata of a server and its models in the Open Inference Protocol, with Triton's names.

`model_config`, `statistics` and `index` also have the fields of the gRPC messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeline.core.shapes import TensorSpec
from service.codecs.tensors import datatype_of
from service.inference import Served, Statistics, Total

EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
SHARED_MEMORY = "system_shared_memory"
STATES = {"loading": "LOADING", "ready": "READY", "draining": "UNLOADING", "failed": "UNAVAILABLE"}

Document = dict[str, Any]


def server_metadata(version: str, shared_memory: bool) -> Document:
    """Describe the server, with the extension for shared memory if that is switched on."""
    extensions = [*EXTENSIONS, *([SHARED_MEMORY] if shared_memory else [])]
    return {"name": "crucible", "version": version, "extensions": extensions}


def model_metadata(served: Served, versions: Iterable[int]) -> Document:
    """Describe a model; -1 stands for a variable size."""
    return {
        "name": served.model,
        "versions": [str(version) for version in sorted(versions)],
        "platform": served.backend,
        "inputs": [_tensor(spec) for spec in served.inputs],
        "outputs": [_tensor(spec) for spec in served.outputs],
    }


def model_config(served: Served) -> Document:
    """Describe a model as Triton's ModelConfig.

    If `max_batch_size` is not 0, requests are joined along the first axis, and `dims` omit it.
    """
    first = _joined_first(served)
    config: Document = {
        "name": served.model,
        "platform": served.backend,
        "backend": served.backend,
        "version_policy": {"specific": {"versions": [served.version]}},
        "max_batch_size": served.max_batch if first else 0,
        "input": [_config_tensor(spec, first) for spec in served.inputs],
        "output": [_config_tensor(spec, first) for spec in served.outputs],
        "instance_group": [{"name": served.device, **_instances(served)}],
    }
    if first:
        config["dynamic_batching"] = {}
    return config


def statistics(models: Iterable[Statistics]) -> Document:
    return {"model_stats": [_model_statistics(model) for model in models]}


def index(models: Iterable[Served]) -> list[Document]:
    return [
        {
            "name": served.model,
            "version": str(served.version),
            "state": STATES[served.state],
            "reason": served.reason,
        }
        for served in models
    ]


def _tensor(spec: TensorSpec) -> Document:
    return {"name": spec.name, "datatype": datatype_of(spec.dtype), "shape": _sizes(spec)}


def _config_tensor(spec: TensorSpec, first: bool) -> Document:
    return {
        "name": spec.name,
        "data_type": f"TYPE_{datatype_of(spec.dtype)}",
        "dims": _sizes(spec)[1 if first else 0 :],
    }


def _sizes(spec: TensorSpec) -> list[int]:
    return [-1 if isinstance(size, str) else size for size in spec.shape]


def _joined_first(served: Served) -> bool:
    """Return True if requests are joined along the first axis of every tensor."""
    axes = [served.batch.axes.get(spec.name) for spec in (*served.inputs, *served.outputs)]
    return served.max_batch > 1 and all(axis == 0 for axis in axes)


def _instances(served: Served) -> Document:
    """Describe the instances; as in Triton, `count` is the number on each GPU."""
    numbers = [each.device.removeprefix("gpu:") for each in served.devices]
    gpus = [int(number) for number in numbers if number.isdecimal()]
    return {"kind": "KIND_GPU" if gpus else "KIND_CPU", "count": served.instances, "gpus": gpus}


def _model_statistics(model: Statistics) -> Document:
    return {
        "name": model.model,
        "version": str(model.version),
        "last_inference": model.last_request_ms,
        "inference_count": model.rows,
        "execution_count": model.executions,
        "inference_stats": {
            "success": _total(model.succeeded),
            "fail": _total(model.failed),
            "queue": _total(model.queue),
            "compute_input": _total(model.copy_in),
            "compute_infer": _total(model.compute),
            "compute_output": _total(model.copy_out),
        },
        "batch_stats": [
            {"batch_size": rows, "compute_infer": _total(total)}
            for rows, total in sorted(model.batches.items())
        ],
    }


def _total(total: Total) -> Document:
    return {"count": total.count, "ns": round(total.seconds * 1e9)}
