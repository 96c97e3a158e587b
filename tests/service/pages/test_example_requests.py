"""The requests that the page of a model shows, run as a reader would run them."""

import ast
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from PIL import Image

from pipeline.core.shapes import TensorSpec
from service.codecs.tensors import Array, dtype_of
from service.http.routers.infer import JSON, NPY
from service.pages.example_requests import Example, Sent, examples
from tests.service.builders.jobs import WITHIN_S
from tests.service.builders.serving import serving_models
from tests.service.builders.tensors import key_of


def given(name: str, dtype: str, values: list[list[float]]) -> Sent:
    spec = TensorSpec(name=name, dtype=dtype, shape=("batch", 4))
    return Sent(spec, np.array(values, dtype_of(name, dtype)), JSON, values=values)


def zeros(name: str, dtype: str) -> Sent:
    spec = TensorSpec(name=name, dtype=dtype, shape=("batch", 4))
    return Sent(spec, np.zeros((1, 4), dtype_of(name, dtype)))


def file(name: str, dtype: str, array: Array) -> Sent:
    spec = TensorSpec(name=name, dtype=dtype, shape=("batch", 4))
    return Sent(spec, array, NPY, f"the {name}.npy")


def run(example: Example, folder: Path, key: str) -> str:
    command = ["bash", "-c"] if example.tool == "curl" else [sys.executable, "-c"]
    result = subprocess.run(
        [*command, example.text],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "CRUCIBLE_KEY": key},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_every_example_runs_and_gives_the_same_answer(tmp_path: Path) -> None:
    bfloat16 = np.array([[1, 2, 3, 4.5]], ml_dtypes.bfloat16)
    np.save(tmp_path / "the x.npy", bfloat16)
    np.save(tmp_path / "the b.npy", np.array([[1, 1, 1, 1]], np.float32))
    picture = io.BytesIO()
    Image.new("RGB", (8, 8), (255, 0, 0)).save(picture, "PNG")
    (tmp_path / "a b.png").write_bytes(picture.getvalue())
    image = TensorSpec(name="image", dtype="float32", shape=("batch", 3, 8, 8))
    a = given("a", "float32", [[1, 2, 3, 0.5]])
    b = np.ones((1, 4), np.float32)
    requests = {
        "add": [
            ([a, given("b", "float32", [[1, 1, 1, 1]])], "2 3 4 1.5"),
            ([a, zeros("b", "float32")], "1 2 3 0.5"),
            ([a, file("b", "float32", b)], "2 3 4 1.5"),
        ],
        "same_bfloat16": [([file("x", "bfloat16", bfloat16)], "1 2 3 4.5")],
        "same_bool": [([zeros("x", "bool")], "false false false false")],
        "photos": [([Sent(image, np.zeros(0), "image/png", "a b.png")], "2 -2 -2")],
    }
    with serving_models(tmp_path / "home", keys_required="true") as server:
        key = key_of(tmp_path / "home", "infer")
        for model, cases in requests.items():
            for sent, expected in cases:
                for example in examples(f"{server.url}/", model, sent, needs_key=True):
                    if not example.text:
                        assert (model, example.tool) == ("photos", "tritonclient")
                        continue
                    found = run(example, tmp_path, key)
                    assert expected in numbers_of(found), (example.text, found)


def numbers_of(text: str) -> str:
    """Return a text without what JSON, Python and numpy write in different ways."""
    words = re.sub(r"[\[\],]", " ", text.lower()).split()
    return " ".join(re.sub(r"^(-?\d+)\.0?$", r"\1", word) for word in words)


def test_hostile_names_are_quoted_in_every_language() -> None:
    name = "x'); import os; $(touch /tmp/no) \"\n\\"
    for sent in ([given(name, "float32", [[1.0]])], [zeros(name, "float32")]):
        curl, python, triton = examples("http://h/", "m", sent, needs_key=False)
        ast.parse(python.text)
        ast.parse(triton.text)
        assert repr(name) in triton.text
        if sent[0].kind == JSON:
            body = shlex.split(curl.text)[-1]
            assert json.loads(body) == {"inputs": {name: [[1.0]]}}
        else:
            first, program, last = curl.text.split("END")
            ast.parse(program.partition("\n")[2])
            assert first.endswith("<<'")
            assert shlex.split(last)[0] == "curl"
