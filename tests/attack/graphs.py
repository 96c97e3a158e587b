"""ONNX graphs that read other files, take all memory, or never end."""

from __future__ import annotations

import io
import tarfile

import onnx
from onnx import TensorProto, helper

from tests.attack.expect import check_no_secret, counted, expect, refused_upload
from tests.attack.targets import Server, Targets, started
from tests.service.integration.test_faults import claims_one_terabyte, nested, one_terabyte

TRIPS = 10**9
LOOP_TIMEOUT_S = 20
NESTED_LEVELS = 10**4


def external_data(targets: Targets) -> str:
    """Send tensors whose data lies in other files of the server, or beyond the end of a file."""
    entries: dict[str, dict[str, str]] = {
        "..": {"location": "../../../crucible.db"},
        "absolute": {"location": "/etc/passwd"},
        "device": {"location": "/dev/zero"},
        "process": {"location": "/proc/self/environ"},
        "itself, huge offset": {"location": "model.onnx", "offset": str(2**62)},
        "itself, huge length": {"location": "model.onnx", "length": str(2**62)},
        "itself, negative": {"location": "model.onnx", "offset": "-4"},
        "no number": {"location": "model.onnx", "offset": "9" * 5000},
    }
    uploads = [(name, external(sparse=False, **entry)) for name, entry in entries.items()]
    uploads += [("sparse tensor", external(sparse=True, location="/etc/passwd"))]
    return _all_fail(targets, uploads, "model.")


def external_link(targets: Targets) -> str:
    """Send external data as a link, in a .tar beside its model."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        model = external(sparse=False, location="w.bin")
        member = tarfile.TarInfo("m.onnx")
        member.size = len(model)
        archive.addfile(member, io.BytesIO(model))
        link = tarfile.TarInfo("w.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return refused_upload(targets.server, "link", targets.files("l", data.getvalue(), "m.tar"), 422)


def endless_loop(targets: Targets) -> str:
    """Send a Loop with 10^9 trips to a server that gives a job 20 s."""
    with started(targets.folder / "loop", job_timeout_s=LOOP_TIMEOUT_S) as server:
        job = server.job(targets.files("loop", loop()))
        _check_next(targets, server)
    return _failure(server, "loop", job, "job.")


def huge_tensors(targets: Targets) -> str:
    """Send a graph that makes a terabyte, and one that claims to bring a terabyte."""
    uploads = [("makes", one_terabyte()), ("claims", claims_one_terabyte())]
    return _all_fail(targets, uploads, "")


def nested_graph(targets: Targets) -> str:
    """Send a protobuf message of 10^4 levels."""
    return _all_fail(targets, [("nested", nested(NESTED_LEVELS))], "model.")


def external(sparse: bool, **entries: str) -> bytes:
    """Return y = x + w, with w (4 floats) in external data."""
    tensor = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y])
    if sparse:
        indices = helper.make_tensor("i", TensorProto.INT64, [4], range(4))
        graph.sparse_initializer.add(values=tensor, indices=indices, dims=[4])
    else:
        graph.initializer.append(tensor)
    return _serialized(graph)


def loop() -> bytes:
    """Return y = x + 1 + 1 + ..., 10^9 times."""
    values = {
        name: helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in (
            ("i", TensorProto.INT64, []),
            ("c", TensorProto.BOOL, []),
            ("d", TensorProto.BOOL, []),
            ("a", TensorProto.FLOAT, [1]),
            ("b", TensorProto.FLOAT, [1]),
            ("x", TensorProto.FLOAT, [1]),
            ("y", TensorProto.FLOAT, [1]),
        )
    }
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    nodes = [
        helper.make_node("Add", ["a", "one"], ["b"]),
        helper.make_node("Identity", ["c"], ["d"]),
    ]
    body = helper.make_graph(
        nodes, "body", [values[name] for name in "ica"], [values[name] for name in "db"], [one]
    )
    trips = helper.make_tensor("trips", TensorProto.INT64, [], [TRIPS])
    go = helper.make_tensor("go", TensorProto.BOOL, [], [True])
    node = helper.make_node("Loop", ["trips", "go", "x"], ["y"], body=body)
    return _serialized(helper.make_graph([node], "g", [values["x"]], [values["y"]], [trips, go]))


def _serialized(graph: onnx.GraphProto) -> bytes:
    data: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()
    return data


def _all_fail(targets: Targets, uploads: list[tuple[str, bytes]], code: str) -> str:
    """Submit all, and return how they failed. The next job must succeed."""
    server, ids = targets.server, {}
    with server.client() as client:
        for name, model in uploads:
            answer = client.post("/compile", files=targets.files("graph", model))
            expect(answer.status_code == 202, f"{name}: {answer.text[:200]}")
            ids[name] = str(answer.json()["id"])
    codes = [_failure(server, name, server.ended(job), code) for name, job in ids.items()]
    _check_next(targets, server)
    return f"the jobs fail: {counted(codes)}"


def _failure(server: Server, name: str, job: dict[str, object], code: str) -> str:
    """Return the code of a job's failure, which must begin with `code`."""
    expect(job["state"] == "failed", f"{name}: the job {job['state']}")
    failure = job["failure"]
    assert isinstance(failure, dict)
    expect(failure["code"].startswith(code), f"{name}: {failure['code']} {failure['message']}")
    check_no_secret(server, f"the failure of {name}", str(job))
    return str(failure["code"])


def _check_next(targets: Targets, server: Server) -> None:
    job = server.job(targets.files("next"))
    expect(job["state"] == "succeeded", f"the next job {job['state']}: {job['failure']}")
