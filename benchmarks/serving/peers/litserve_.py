"""LitServe with one API process and one worker, and with `fast_queue`, which its documentation
advises for hundreds of requests per second.
"""

from typing import Annotated

import litserve
import numpy as np
from fastapi import Body, Response
from shapes import MAX_ROWS, MODEL, PORT, WAIT_S, batches, load, row_from


class Api(litserve.LitAPI):
    def setup(self, device):
        self.run = load(MODEL)

    def decode_request(
        self, request: Annotated[bytes, Body(media_type="application/octet-stream")]
    ):
        return row_from(request)

    def batch(self, inputs):
        return np.stack(inputs)

    def predict(self, x):
        return self.run(x if batches(MODEL) else x[None])

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output) -> Response:
        return Response(output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    options = {"max_batch_size": MAX_ROWS, "batch_timeout": WAIT_S} if batches(MODEL) else {}
    server = litserve.LitServer(
        Api(api_path="/infer", **options), accelerator="cpu", fast_queue=True
    )
    server.run(
        host="127.0.0.1",
        port=PORT,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
    )
