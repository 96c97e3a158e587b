"""PyTriton: Triton's own HTTP server and batcher, and the model in a Python process."""

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig
from shapes import MAX_ROWS, MODEL, PORT, WAIT_S, batches, load

model = load(MODEL)


@batch
def infer(x):
    return [model(x)]


if __name__ == "__main__":
    joined = ModelConfig(
        max_batch_size=MAX_ROWS,
        batcher=DynamicBatcher(max_queue_delay_microseconds=int(WAIT_S * 1e6)),
    )
    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=PORT,
        grpc_port=PORT + 1,
        allow_grpc=False,
        allow_metrics=False,
        exit_timeout_secs=3,
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name="model",
            infer_func=infer,
            inputs=[Tensor(name="x", dtype=np.float32, shape=(3, -1, -1))],
            outputs=[
                Tensor(name="y", dtype=np.float32, shape=(-1,) if batches(MODEL) else (3, -1, -1))
            ],
            config=joined if batches(MODEL) else ModelConfig(max_batch_size=1),
            strict=False,
        )
        triton.serve()
