"""Bodies of inference requests that carry code, lie about their size, or are too deep."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct

import numpy as np

from tests.attack.expect import counted, expect, refused
from tests.attack.targets import MODEL, Targets
from tests.attack.uploads import Writes

DEPTH, DIGITS = 10**5, 10**6
NATIVE, OIP = f"/models/{MODEL}/infer", f"/v2/models/{MODEL}/infer"
X = np.zeros((1, 16), np.float32)
Body = tuple[bytes, dict[str, str]]  # with the headers that describe it


def npy(targets: Targets) -> str:
    """Send .npy with objects, with a huge shape, and with headers that lie."""
    mark = targets.folder / "mark"
    objects, plain = io.BytesIO(), io.BytesIO()
    np.save(objects, np.array([Writes(mark)], object), allow_pickle=True)
    np.save(plain, X)
    data = plain.getvalue()
    bodies = {
        "objects": objects.getvalue(),
        "pickle": pickle.dumps(Writes(mark)),
        "huge shape": _header("(4611686018427387904, 16)"),
        "overflowing shape": _header("(4294967296, 4294967296)"),
        "negative shape": _header("(-1, 16)"),
        "shape of text": _header("('a',)"),
        "code": _header(f"open({str(mark)!r}, 'w')"),
        "long header": data[:8] + b"\xff\xff" + data[10:],
        "cut off": data[:-1],
        "too long": data + b"x",
        "version": data[:6] + b"\x09\x09" + data[8:],
    }
    headers = {"Content-Type": "application/x-npy"}
    how = _refuse_bodies(targets, NATIVE, {name: (body, headers) for name, body in bodies.items()})
    expect(not mark.exists(), "the code ran")
    return how


def oip_binary(targets: Targets) -> str:
    """Send binary tensors of the Open Inference Protocol whose sizes lie."""
    data = X.tobytes()

    def body(size: object, shape: object = (1, 16), length: object = None) -> Body:
        tensor = {"name": "x", "datatype": "FP32", "shape": shape}
        tensor |= {"parameters": {"binary_data_size": size}}
        head = json.dumps({"inputs": [tensor]}).encode()
        name = "Inference-Header-Content-Length"
        return head + data, {name: str(len(head) if length is None else length)}

    bodies = {
        "too large": body(2**62),
        "too small": body(1),
        "negative": body(-64),
        "text": body("64"),
        "overflowing shape": body(64, (2**32, 2**32)),
        "negative shape": body(64, (-1, -16)),
        "huge shape": body(64, (2**62,)),
        "many axes": body(64, (1,) * 10_000),
        "head beyond the body": body(64, length=10**9),
        "head of 10^17 bytes": body(64, length=10**17),
        "negative head": body(64, length=-5),
        "head of no bytes": body(64, length=0),
        "head that is no number": body(64, length="0x10"),
    }
    return _refuse_bodies(targets, OIP, bodies)


def json_texts(targets: Targets) -> str:
    """Send JSON with 10^5 levels, 10^6 digits, NaN, double keys and broken text."""
    head = b'{"inputs": {"x": '
    texts = {
        "lists": head + b"[" * DEPTH + b"]" * DEPTH + b"}}",
        "objects": b'{"a":' * DEPTH + b"1" + b"}" * DEPTH,
        "open": b"[" * DEPTH,
        "digits": head + b"[[" + b"9" * DIGITS + b"]]}}",
        "exponent": head + b"[[1e999999999]]}}",
        "NaN": head + b"[[" + b"NaN," * 15 + b"NaN]]}}",
        "Infinity": head + b"[[" + b"-Infinity," * 15 + b"1]]}}",
        "text": head + b'[["' + b"a" * DIGITS + b'"]]}}',
        "ragged": head + b"[[1, 2], [3]]}}",
        "surrogate": head + b'"\\ud800"}}',
        "no UTF-8": head + b'"\xff\xfe"}}',
    }
    bodies = {name: (text, {"Content-Type": "application/json"}) for name, text in texts.items()}
    return "; ".join(_refuse_bodies(targets, path, bodies) for path in (NATIVE, OIP))


def compressed(targets: Targets) -> str:
    """Send bodies that unpack to 1 GB, in gzip and deflate, and unknown encodings."""
    bomb = gzip.compress(bytes(10**9), 1)
    kinds = {"gzip": bomb, "deflate": bomb[10:-8], "gzip, gzip": bomb, "br": b"x", "zstd": b"x"}
    headers = {"Content-Type": "application/json"}
    return _refuse_bodies(
        targets,
        OIP,
        {kind: (body, headers | {"Content-Encoding": kind}) for kind, body in kinds.items()},
    )


def _header(shape: str) -> bytes:
    """Return .npy of 64 bytes with this text as its shape."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + X.tobytes()


def _refuse_bodies(targets: Targets, path: str, bodies: dict[str, Body]) -> str:
    """Return how the bodies were refused. The model must answer afterwards."""
    with targets.server.client("victim") as client:
        how = counted(
            refused(
                name,
                client.post(path, content=body, headers=headers),
                *(400, 413, 415, 422),
            )
            for name, (body, headers) in bodies.items()
        )
        answer = client.post(NATIVE, json={"inputs": {"x": X.tolist()}})
    expect(answer.status_code == 200, f"a valid body: {answer.text[:200]}")
    return how
