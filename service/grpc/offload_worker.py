"""`python -m service.grpc.offload_worker`: a helper as service.offload.worker is.

It converts gRPC requests that have long lists of numbers as tensors.
"""

from __future__ import annotations

from service.grpc.codec import inputs_from, parsed
from service.grpc.grpc_service_pb2 import ModelInferRequest
from service.offload.worker import serve
from service.sandbox.framing import Parts


def raw_form(body: bytes) -> tuple[int, Parts]:
    """Convert a request to one with raw tensors; Unprocessable if it is invalid."""
    message = parsed(ModelInferRequest, body)
    arrays = inputs_from(message)
    for tensor in message.inputs:
        if tensor.name in arrays:  # not those in shared memory
            tensor.ClearField("contents")
    message.raw_input_contents[:] = [array.tobytes() for array in arrays.values()]
    return 0, [message.SerializeToString()]


if __name__ == "__main__":
    serve({raw_form.__name__: raw_form})
