"""A delivered engine behind Ray Serve: `serve run --app-dir docker ray_serve:app engine=OUT`.

POST {"inputs": {"x": [[...]]}} answers {"outputs": {"y": [[...]]}}. Each replica has the engine in
its own process. Give each one the device for which the engine was built: `num_gpus=1` for a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

import pipeline


@serve.deployment
class EngineDeployment:
    """One replica. Requests of one replica run one after the other, as an engine needs it."""

    def __init__(self, folder: str) -> None:
        self._engine = pipeline.open_engine(folder)

    async def __call__(self, request: Request) -> JSONResponse:
        dtypes = {spec.name: spec.dtype for spec in self._engine.inputs}
        try:
            sent: dict[str, Any] = (await request.json())["inputs"]
            inputs = {name: np.asarray(each, dtypes.get(name)) for name, each in sent.items()}
            outputs = self._engine.run(inputs)
        except KeyError:
            return _refusal('expected {"inputs": {NAME: VALUES}}, got no `inputs`')
        except (ValueError, pipeline.CrucibleError) as error:
            return _refusal(str(error))
        return JSONResponse({"outputs": {name: each.tolist() for name, each in outputs.items()}})


def _refusal(error: str) -> JSONResponse:
    return JSONResponse({"error": error}, status_code=400)


def app(arguments: dict[str, str]) -> serve.Application:
    """Build the application of `serve run`, whose argument is `engine=FOLDER`."""
    return EngineDeployment.bind(arguments["engine"])
