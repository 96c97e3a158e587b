"""`docker/ray_serve.py` on a real Ray Serve."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import pipeline

ROOT = Path(__file__).parents[2]
# ray.serve is a part of `ray`; this package comes with the extra
MISSING = "" if find_spec("ray") and find_spec("grpc_reflection") else "install ray[serve]"
ASK = """
import json, sys, urllib.error, urllib.request
import ray
from ray import serve
import ray_serve

folder, port, bodies = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(ray_serve.app({"engine": folder}))
for body in bodies:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", json.dumps(body).encode())
    try:
        answer, status = urllib.request.urlopen(request), 200
    except urllib.error.HTTPError as error:
        answer, status = error, error.code
    print(json.dumps([status, json.loads(answer.read())]))
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"Ray Serve test: {MISSING}")
def test_an_engine_answers_behind_ray_serve(compiled: tuple[Path, Path]) -> None:
    folder = compiled[0] / "out"
    with pipeline.open_engine(folder) as engine:
        (spec,) = engine.inputs
        shape = [size if isinstance(size, int) else 2 for size in spec.shape]
        x = np.random.default_rng(0).normal(size=shape).astype(spec.dtype)
        expected = engine.run({spec.name: x})
    bodies = [{"inputs": {spec.name: x.tolist()}}, {"inputs": {}}, {}]
    with socket.socket() as probe, tempfile.TemporaryDirectory(prefix="ray-") as short:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        path = f"{ROOT}:{ROOT / 'docker'}"  # also of Ray's workers
        environment = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": short, "PYTHONPATH": path}
        result = subprocess.run(
            [sys.executable, "-c", ASK, str(folder), str(port), json.dumps(bodies)],
            env={**os.environ, **environment, "RAY_USAGE_STATS_ENABLED": "0"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    right, without, empty = [json.loads(line) for line in result.stdout.splitlines()[-3:]]
    assert right[0] == 200
    for name, values in expected.items():
        np.testing.assert_allclose(right[1]["outputs"][name], values, rtol=1e-5)
    assert (without[0], empty[0]) == (400, 400)
    assert spec.name in without[1]["error"]
    assert "got no `inputs`" in empty[1]["error"]
