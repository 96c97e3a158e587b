"""Keys that are not valid, and a tenant who asks for what belongs to another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import grpc
from google.protobuf.message import Message

from service.grpc import grpc_service_pb2 as pb
from tests.attack.expect import check_no_secret, counted, expect, refused, statuses_in
from tests.attack.targets import ATTACKER, MODEL, Server, Targets, started
from tests.builders.cli import environment
from tests.service.builders.tensors import metadata_of, method_of

GUESSES = 300


def forged_keys(targets: Targets) -> str:
    """Use keys that are empty, invented, cut off, huge, of another form, or in another place."""
    key = targets.server.keys["victim"]
    texts = (
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {key[:-1]}",
        f"Bearer {key}x",
        f"Bearer {key[:15]}_{'A' * 43}",
        f"Bearer cru_{'0' * 10}_{'A' * 43}",
        f"Bearer {key.upper()}",
        f"Bearer {'A' * 60_000}",
        f"Bearer {key},{key}",
        f"Bearer {key} {key}",
        f"Basic {key}",
        key,
        "Bearer é",
        "Bearer ' OR 1=1 --",
        "Bearer cru_%_",
    )
    host = f"{targets.server.address[0]}:{targets.server.address[1]}"
    answers = []
    for line, path in (
        *((f"Authorization: {text}", "/jobs") for text in texts),
        (f"Cookie: key={key}", f"/jobs?key={key}&authorization=Bearer%20{key}"),
        (f"X-Api-Key: {key}\r\nProxy-Authorization: Bearer {key}", "/jobs"),
    ):
        head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{line}\r\nConnection: close\r\n\r\n"
        statuses = statuses_in(targets.server.answer_to(head.encode(), ATTACKER))
        expect(len(statuses) == 1, f"{line[:40]}: {statuses}")
        expect(statuses[0] in (400, 401, 429, 431), f"{line[:40]}: {statuses}")
        answers.append(str(statuses[0]))
    return counted(answers)


def guessed_keys(targets: Targets) -> str:
    """Guess 300 secrets for the prefix of a known key; its owner calls from another address."""
    with started(targets.folder / "guesses") as server:
        known = server.keys["victim"]
        with server.client(address=ATTACKER) as client:
            answers = [
                str(client.get("/jobs", headers=_bearer(f"{known[:15]}{number:043d}")).status_code)
                for number in range(GUESSES)
            ]
        with server.client("victim") as client:
            status = client.get("/jobs").status_code
    expect("429" in answers, f"{counted(answers)}: nobody slows the guesses down")
    expect(set(answers) <= {"401", "429"}, counted(answers))
    expect(status == 200, f"the owner of the key gets {status}")
    return f"{counted(answers)}; the owner gets 200"


def revoked_key(targets: Targets) -> str:
    """Use a key over HTTP and gRPC, before and right after it is revoked."""
    with started(targets.folder / "revoked") as server:
        key = server.keys["victim"]
        before = _use(server, key)
        words = [sys.executable, "-m", "pipeline.cli", "keys", "revoke", key[4:14]]
        more = {"CRUCIBLE_HOME": str(server.home)}
        subprocess.run(words, env=environment(more), check=True, capture_output=True)
        after = _use(server, key)
    expect(before == "200, OK", f"before: {before}")
    expect(after == "401, UNAUTHENTICATED", f"after: {after}")
    return after


def other_tenant(targets: Targets) -> str:
    """Ask for the job, log, events, report, engine and model of another tenant, by their names."""
    job, answers = targets.victims_job, []
    gets = [f"/jobs/{job}{path}" for path in ("", "/log", "/events")]
    gets += [f"/reports/{job}{path}" for path in ("", "/latency", "/accuracy", "/samples")]
    gets += [f"/reports/{job}/engine.tar", f"/models/{MODEL}", f"/models/{MODEL}/shapes"]
    gets += [f"/v2/models/{MODEL}{path}" for path in ("", "/ready", "/config", "/stats")]
    posts: dict[str, object] = {
        f"/jobs/{job}/retry": None,
        "/models/mine/promote": {"report": job},
        f"/models/{MODEL}/promote": {"report": job},
        f"/models/{MODEL}/rollback": None,
        f"/models/{MODEL}/benchmark": {},
        f"/models/{MODEL}/recompile": {},
        f"/models/{MODEL}/infer": {"inputs": {"x": [[0.0] * 16]}},
        f"/v2/models/{MODEL}/infer": {"inputs": []},
        f"/v2/repository/models/{MODEL}/load": {},
        f"/v2/repository/models/{MODEL}/unload": {},
    }
    with targets.server.client("attacker") as client:
        for path in gets:
            answers.append(refused(f"GET {path}", client.get(path), 404))
        for path, body in posts.items():
            answers.append(refused(f"POST {path}", client.post(path, json=body), 403, 404))
        answers.append(refused("PUT", client.put(f"/models/{MODEL}/deployment", json={}), 403, 404))
        for path in (f"/jobs/{job}", f"/models/{MODEL}/deployment"):
            answers.append(refused(f"DELETE {path}", client.delete(path), 403, 404))
    for code in _answers_over_grpc(targets.server):
        expect(code in ("NOT_FOUND", "PERMISSION_DENIED"), f"gRPC answers {code}")
        answers.append(code)
    return counted(answers)


def lists(targets: Targets) -> str:
    """Look for another tenant's job, model and owner in every list."""
    paths = ("/jobs", "/jobs?limit=200", "/models", "/v2", "/v2/models/stats")
    with targets.server.client("attacker") as client:
        texts = {path: client.get(path).text for path in paths}
        texts["index"] = client.post("/v2/repository/index", json={}).text
        same = client.post("/compile", files=targets.files(MODEL)).json()
        expect(same["id"] != targets.victims_job, "an equal upload gets the victim's job")
        client.delete(f"/jobs/{same['id']}")
    targets.server.ended(same["id"])
    for path, text in texts.items():
        for what in (targets.victims_job, MODEL, "victim"):
            expect(what not in text, f"{path} shows '{what}'")
    return f"none in {len(texts)} answers; an equal upload makes a job of its own"


def secrets(targets: Targets) -> str:
    """Look for keys, the environment and paths of the server in all that it shows and logs."""
    server, job = targets.server, targets.victims_job
    paths = [f"/jobs/{job}{path}" for path in ("", "/log")]
    paths += [f"/reports/{job}", f"/models/{MODEL}", "/models", "/metrics", "/v2", "/openapi.json"]
    with server.client("victim") as client:
        for path in paths:
            check_no_secret(server, path, client.get(path).text)
        for form in ("text/html", "text/markdown"):
            answer = client.get(f"/reports/{job}", headers={"Accept": form})
            check_no_secret(server, form, answer.text)
        engine = client.get(f"/reports/{job}/engine.tar").content
        check_no_secret(server, "the engine", engine.decode("latin-1"))
        with client.stream("GET", f"/jobs/{job}/events") as events:
            check_no_secret(server, "the events", events.read().decode())
    for tenant, key in server.keys.items():
        expect(key not in server.log(), f"the server's log shows the key of {tenant}")
    return f"nothing in {len(paths) + 4} answers and in the log"


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _use(server: Server, key: str) -> str:
    """Return the status of HTTP and the code of gRPC for a key."""
    with server.client(key=key) as client, grpc.insecure_channel(server.rpc) as channel:
        call = method_of(channel, "RepositoryIndex")
        future = call.future(pb.RepositoryIndexRequest(), metadata=metadata_of(key))
        return f"{client.get('/jobs').status_code}, {future.code().name}"


def _answers_over_grpc(server: Server) -> Iterator[str]:
    """Yield the codes of the attacker's calls for the victim's model."""
    metadata = metadata_of(server.keys["attacker"])
    messages: dict[str, Message] = {
        "ModelInfer": pb.ModelInferRequest(model_name=MODEL),
        "ModelMetadata": pb.ModelMetadataRequest(name=MODEL),
        "ModelConfig": pb.ModelConfigRequest(name=MODEL),
        "ModelStatistics": pb.ModelStatisticsRequest(name=MODEL),
        "RepositoryModelLoad": pb.RepositoryModelLoadRequest(model_name=MODEL),
        "RepositoryModelUnload": pb.RepositoryModelUnloadRequest(model_name=MODEL),
    }
    with grpc.insecure_channel(server.rpc) as channel:
        for name, message in messages.items():
            yield method_of(channel, name).future(message, metadata=metadata).code().name
