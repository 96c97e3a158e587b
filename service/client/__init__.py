"""Client of the service, for programs and for `crucible submit | wait | report | promote | load |
benchmark`. Imports no server code.

    with Client("http://127.0.0.1:8000", key) as client:
        job = client.submit(Upload(Path("model.onnx"), plan=Path("plan.yaml")))
        for event in client.events(job.id): ...      to the job's end, over restarts of the server
        report = client.report(job.id)

RemoteError carries the server's refusal of a request; Unreachable means that the server does not
answer.
"""

from service.client.client import Client, Inference
from service.client.errors import RemoteError, Unreachable
from service.client.events import Event
from service.client.upload import Upload

__all__ = ["Client", "Event", "Inference", "RemoteError", "Unreachable", "Upload"]
