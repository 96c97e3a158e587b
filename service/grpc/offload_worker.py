"""`python -m service.grpc.offload_worker`: as service.offload.worker, for requests over gRPC whose
tensors are long lists of numbers.
"""

from __future__ import annotations

from service.grpc.codec import inputs_from, parsed
from service.grpc.grpc_service_pb2 import ModelInferRequest
from service.offload.worker import Head, Parts, serve


def raw_form(body: bytes) -> tuple[Head, Parts]:
    """Any request, as one with raw tensors. Unprocessable as `request_from` says."""
    message = parsed(ModelInferRequest, body)
    arrays = inputs_from(message)
    for each in message.inputs:
        each.ClearField("contents")
    message.raw_input_contents[:] = [arrays[each.name].tobytes() for each in message.inputs]
    return {}, [message.SerializeToString()]


if __name__ == "__main__":
    serve({raw_form.__name__: raw_form})
