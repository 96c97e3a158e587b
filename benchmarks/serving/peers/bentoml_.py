"""BentoML with one worker. Rows are joined by a service of its own behind the one that reads raw
bodies, since only arrays can be joined.
"""

import os
from pathlib import Path
from typing import Annotated

import bentoml
import numpy as np
from bentoml.validators import ContentType
from shapes import MAX_ROWS, MODEL, PORT, batches, load, row_from

MODEL = (
    MODEL or os.environ["BENCH_MODEL"]
)  # `bentoml serve` imports this file in processes of its own
Raw = Annotated[bytes, ContentType("application/octet-stream")]


@bentoml.service(workers=1, traffic={"timeout": 60})
class Engine:
    def __init__(self) -> None:
        self.model = load(MODEL)

    @bentoml.api(batchable=True, max_batch_size=MAX_ROWS, max_latency_ms=1000)
    def run(self, rows: np.ndarray) -> np.ndarray:
        return self.model(rows)


@bentoml.service(workers=1, traffic={"timeout": 60})
class Joined:
    engine = bentoml.depends(Engine)

    @bentoml.api
    async def infer(self, body: Raw, /) -> Raw:
        return (await self.engine.to_async.run(row_from(body)[None])).tobytes()


@bentoml.service(workers=1, traffic={"timeout": 60})
class Plain:
    def __init__(self) -> None:
        self.model = load(MODEL)

    @bentoml.api
    async def infer(self, body: Raw, /) -> Raw:
        return self.model(row_from(body)[None]).tobytes()


if __name__ == "__main__":
    os.environ["BENCH_MODEL"] = MODEL
    here = Path(__file__)
    service = f"{here.stem}:{'Joined' if batches(MODEL) else 'Plain'}"
    os.chdir(here.parent)
    os.execlp("bentoml", "bentoml", "serve", service, "--port", str(PORT), "--host", "127.0.0.1")
