"""GRU, LSTM and RNN in 16 bits on TensorRT: built, close to fp32, and really run in 16 bits where
the parser takes them so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.compiler.graph import export_plan
from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel, TensorRTOptions
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Profile, Tensors
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.onnx_graph.compare import open_reference
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.plan.files import plan_from_document
from pipeline.results.precision_audit import mislabelled
from pipeline.stages.convert import convert
from pipeline.stages.inspect_layers import prove
from tests.builders.recurrent import PROFILE, Form, Operator, feeds_of, forms, write

Array = NDArray[Any]

pytestmark = pytest.mark.gpu
MIN_COSINE = {Precision.FP16: 0.9999, Precision.BF16: 0.999}
QUICK = TensorRTOptions(optimization_level=1, timing_iterations=1)
SIZES = ((6, 3), (1, 1), (9, 4))  # time, batch


@pytest.fixture(autouse=True)
def _own_timing_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRUCIBLE_HOME", str(tmp_path / "home"))


def built(
    model: OnnxModel,
    precision: Precision,
    profiles: tuple[Profile, ...],
    samples: tuple[Tensors, ...],
    folder: Path,
) -> tuple[Engine, OnnxModel]:
    """An engine of the model in this precision, and the graph that the conversion of every compile
    makes for it.
    """
    (folder / "converted").mkdir()
    (folder / "built").mkdir()
    recipe = Recipe(backend="tensorrt", precision=precision)
    result = convert(model, recipe, None, samples, folder / "converted")
    options = BuildOptions(profiles=profiles, tensorrt=QUICK)
    return (
        backends.backend("tensorrt").build(
            result, recipe, options, folder / "built", lambda fraction, text, figures=None: None
        ),
        result,
    )


def smallest_cosine(engine: Engine, model: OnnxModel, batches: list[Tensors]) -> float:
    """Over all outputs and batches, against ONNX Runtime in fp32."""
    reference, cosines = open_reference(model.path), []
    with closing(backends.load(engine)) as loaded, closing(loaded.session(0)) as session:
        for feeds in batches:
            got = run_session(session, feeds)
            for name, want in reference(feeds).items():
                cosines.append(cosine(got[name], want))
    return min(cosines)


def cosine(got: Array, want: Array) -> float:
    a, b = got.astype(np.float64).ravel(), want.astype(np.float64).ravel()
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def stays_in_fp32(form: Form, precision: Precision) -> bool:
    return form.lengths or (form.operator == "GRU" and precision is Precision.BF16)


def cases() -> Iterator[tuple[Form, Precision]]:
    """Each operator with each of its parts once: a case is a build of several seconds.

    tests/pipeline/onnx_graph/test_recurrent.py converts all combinations, which needs no GPU.
    """
    operators: tuple[Operator, ...] = ("GRU", "LSTM", "RNN")
    for operator in operators:
        if operator != "LSTM":  # see test_the_clip_of_an_lstm_reaches_its_cell_too
            yield Form(operator, clip=0.5), Precision.FP16
        yield Form(operator, dynamic=False), Precision.FP16
        yield Form(operator, "reverse", state=True, bias=False), Precision.FP16
        yield Form(operator, "bidirectional", state=True), Precision.FP16
        yield Form(operator, "bidirectional", only_last=True), Precision.FP16
        yield Form(operator, "bidirectional", lengths=True), Precision.FP16
        yield Form(operator, "bidirectional", state=True), Precision.BF16
    yield Form("GRU", "bidirectional", state=True, linear_before_reset=True), Precision.FP16
    yield Form("LSTM", "bidirectional", state=True, peepholes=True), Precision.FP16


CASES = [*cases()]
assert {form for form, _ in CASES} <= {*forms()}, "each is converted without a GPU as well"


@pytest.mark.parametrize(
    ("form", "precision"), CASES, ids=[f"{form}-{precision}" for form, precision in CASES]
)
def test_a_recurrent_node_builds_and_answers_as_in_fp32(
    tmp_path: Path, form: Form, precision: Precision
) -> None:
    model = write(tmp_path / "source", form)
    profiles = (PROFILE,) if form.dynamic else (Profile(),)
    engine, result = built(model, precision, profiles, (feeds_of(form),), tmp_path)
    sizes = SIZES if form.dynamic else SIZES[:1]
    batches = [feeds_of(form, time, batch, seed=1) for time, batch in sizes]
    assert smallest_cosine(engine, model, batches) > MIN_COSINE[precision]
    table = prove(engine, feeds_of(form), result).table
    assert table is not None
    assert bool(result.kept_fp32) is stays_in_fp32(form, precision)
    assert mislabelled(precision, table, forced=result.kept_fp32) == "", table.model_dump_json(
        indent=1
    )


def test_the_clip_of_an_lstm_reaches_its_cell_too(tmp_path: Path) -> None:
    """As ONNX has it: the input of every activation. ONNX Runtime 1.30 clips the gates alone."""
    form = Form("LSTM", clip=0.5)
    model = write(tmp_path / "source", form)
    engine, _ = built(model, Precision.FP16, (PROFILE,), (feeds_of(form),), tmp_path)
    weights = {
        tensor.name: numpy_helper.to_array(tensor)[0]
        for tensor in onnx.load(model.path).graph.initializer
    }
    feeds = feeds_of(form, seed=1)
    with closing(backends.load(engine)) as loaded, closing(loaded.session(0)) as session:
        got = run_session(session, feeds)["y"][:, 0]
    want = clipped_lstm(feeds["x"], weights["w"], weights["r"], weights["b"], form.clip)
    assert cosine(got, want) > MIN_COSINE[Precision.FP16]
    reference = open_reference(model.path)(feeds)["y"][:, 0]
    assert cosine(reference, want) < MIN_COSINE[Precision.FP16]


def clipped_lstm(x: Array, w: Array, r: Array, b: Array, clip: float) -> Array:
    """Hidden states [time, batch, hidden] of an LSTM by ONNX's equations, from zero states; gates
    in ONNX's order, i o f c.
    """
    state, cell, states = np.zeros((x.shape[1], r.shape[1])), np.zeros((x.shape[1], r.shape[1])), []
    of_input, of_state = np.split(b, 2)
    for step in x:
        gates = step @ w.T + of_input + state @ r.T + of_state
        i, o, f, c = np.split(np.clip(gates, -clip, clip), 4, axis=1)
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(c)
        state = sigmoid(o) * np.tanh(np.clip(cell, -clip, clip))
        states.append(state)
    return np.stack(states)


def sigmoid(values: Array) -> Array:
    return 1 / (1 + np.exp(-values))


MODULES = """
import torch

class Recurrent(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body = getattr(torch.nn, kind)(
            16, 32, num_layers=2, batch_first=True, bidirectional=True
        )
        self.head = torch.nn.Linear(64, 8)

    def forward(self, x, h0=None, c0=None):
        state = h0 if c0 is None else (h0, c0)
        return self.head(self.body(x, state)[0])

def of(kind):
    torch.manual_seed(0)
    return Recurrent(kind).eval()

def GRU(): return of("GRU")
def LSTM(): return of("LSTM")
def RNN(): return of("RNN")
"""


def torch_plan(folder: Path, kind: str, states: bool, exporter: str) -> Any:
    (folder / "modules.py").write_text(MODULES)
    state = {"dtype": "float32", "shape": [4, "batch", 32]}
    names = (["h0", "c0"] if kind == "LSTM" else ["h0"]) if states else []
    inputs = [
        {"name": "x", "dtype": "float32", "shape": ["batch", 10, 16]},
        *({"name": name, **state} for name in names),
    ]
    model = {
        "entrypoint": f"modules:{kind}",
        "python_path": str(folder),
        "weights_from": "random: a test",
        "inputs": inputs,
    }
    return plan_from_document(
        {
            "name": "recurrent",
            "model": model,
            "profiles": [{"batch": [1, 4, 8]}],
            "export": {"exporter": exporter},
        },
        folder,
    )


@pytest.mark.parametrize(
    ("states", "exporter"),
    [(False, "dynamo"), (True, "torchscript")],
    ids=["plain dynamo", "states torchscript"],
)
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_torchs_own_modules_run_in_fp16(
    tmp_path: Path, kind: str, states: bool, exporter: str
) -> None:
    plan = torch_plan(tmp_path, kind, states, exporter)
    model = export_plan(plan, Runner(Store(tmp_path / "store")))
    feeds = [draw_feeds(model.inputs, {"batch": batch}, seed=batch) for batch in (1, 4, 8)]
    engine, result = built(model, Precision.FP16, plan.profiles, (feeds[1],), tmp_path)
    assert smallest_cosine(engine, model, feeds) > MIN_COSINE[Precision.FP16]
    table = prove(engine, feeds[1], result).table
    assert table is not None
    assert result.kept_fp32 == ()
    assert mislabelled(Precision.FP16, table) == "", table.model_dump_json(indent=1)
