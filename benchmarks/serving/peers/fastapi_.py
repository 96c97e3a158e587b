"""FastAPI in one process, without batching: uvicorn with uvloop and httptools."""

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from shapes import ECHO, MODEL, PORT, load, row_from

app = FastAPI()
model = load(MODEL)


@app.post("/infer")
async def infer(request: Request) -> Response:
    row = row_from(await request.body())[None]
    answer = model(row) if MODEL == ECHO else await run_in_threadpool(model, row)
    return Response(answer.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning")
