"""What the Open Inference Protocol tells of a server and its models, as documents with Triton's
names.

`model_config`, `statistics` and `index` have the fields of the messages in its gRPC, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeline.core import TensorSpec
from service.codecs.tensors import datatype_of
from service.inference import Served, Statistics, Total

EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
STATES = {"loading": "LOADING", "ready": "READY", "draining": "UNLOADING", "failed": "UNAVAILABLE"}

Document = dict[str, Any]


def server_metadata(version: str) -> Document:
    return {"name": "crucible", "version": version, "extensions": list(EXTENSIONS)}


def model_metadata(served: Served, versions: Iterable[int]) -> Document:
    """-1 stands for a size that varies."""
    return {
        "name": served.model,
        "versions": [str(version) for version in sorted(versions)],
        "platform": served.backend,
        "inputs": [_tensor(spec) for spec in served.inputs],
        "outputs": [_tensor(spec) for spec in served.outputs],
    }


def model_config(served: Served) -> Document:
    """As Triton's: where `max_batch_size` is not 0, requests are joined along the first axis, and
    `dims` leave it out.
    """
    first = _joined_first(served)
    config = {
        "name": served.model,
        "platform": served.backend,
        "backend": served.backend,
        "version_policy": {"specific": {"versions": [served.version]}},
        "max_batch_size": served.max_batch if first else 0,
        "input": [_config_tensor(spec, first) for spec in served.inputs],
        "output": [_config_tensor(spec, first) for spec in served.outputs],
        "instance_group": [{"name": served.device, **_instances(served)}],
    }
    return config | ({"dynamic_batching": {}} if first else {})


def statistics(found: Iterable[Statistics]) -> Document:
    return {"model_stats": [_model_statistics(each) for each in found]}


def index(found: Iterable[Served]) -> list[Document]:
    return [
        {
            "name": each.model,
            "version": str(each.version),
            "state": STATES[each.state],
            "reason": each.reason,
        }
        for each in found
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
    """Whether requests are joined, and along the first axis of every tensor."""
    axes = [served.batch.axes.get(spec.name) for spec in (*served.inputs, *served.outputs)]
    return served.max_batch > 1 and all(axis == 0 for axis in axes)


def _instances(served: Served) -> Document:
    kind, _, number = served.device.partition(":")
    return {
        "kind": "KIND_GPU" if kind == "gpu" else "KIND_CPU",
        "count": served.instances,
        "gpus": [int(number)] if number.isdecimal() else [],
    }


def _model_statistics(found: Statistics) -> Document:
    return {
        "name": found.model,
        "version": str(found.version),
        "last_inference": found.last_request_ms,
        "inference_count": found.rows,
        "execution_count": found.executions,
        "inference_stats": {
            "success": _total(found.succeeded),
            "fail": _total(found.failed),
            "queue": _total(found.queue),
            "compute_input": _total(found.copy_in),
            "compute_infer": _total(found.compute),
            "compute_output": _total(found.copy_out),
        },
        "batch_stats": [
            {"batch_size": rows, "compute_infer": _total(total)}
            for rows, total in sorted(found.batches.items())
        ],
    }


def _total(total: Total) -> Document:
    return {"count": total.count, "ns": round(total.seconds * 1e9)}
