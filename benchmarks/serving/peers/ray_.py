"""Ray Serve with one proxy and one replica."""

import numpy as np
import ray
from ray import serve
from shapes import MAX_ROWS, MODEL, PORT, WAIT_S, batches, load, row_from
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(num_replicas=1, max_ongoing_requests=100)
class Api:
    def __init__(self, name: str) -> None:
        self.name, self.model = name, load(name)

    @serve.batch(max_batch_size=MAX_ROWS, batch_wait_timeout_s=WAIT_S)
    async def joined(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        return list(self.model(np.stack(rows)))

    async def __call__(self, request: Request) -> Response:
        row = row_from(await request.body())
        answer = await self.joined(row) if batches(self.name) else self.model(row[None])
        return Response(answer.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(Api.bind(MODEL), route_prefix="/infer", blocking=True)
