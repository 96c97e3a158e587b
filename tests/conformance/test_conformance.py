"""The same cases on every backend: what a Session promises, whoever runs the graph. A backend that cannot run here is skipped, with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from pipeline import backends
from pipeline.backends.base import Loaded, run_session
from pipeline.core import BuildOptions, Engine, Precision, Recipe, Tensors
from pipeline.errors import BackendUnavailable, CrucibleError, DataError, InternalError, StoreError, UnsupportedError
from tests.conformance.models import CASES, Case, convolution, ramp, several, two_symbols

ON_GPU = ("tensorrt", "tensorrt_rtx")
GRAPH_BACKENDS = [  # the baselines run a module, not a graph: tests/backends
    pytest.param(name, marks=pytest.mark.gpu) if name in ON_GPU else name for name in backends.BACKENDS if name != "pytorch"
]
CAPABILITY = {"tensorrt_rtx": "8.9"}  # a backend that builds for a GPU that is not here


def build(backend: str, case: Case, out: Path) -> Engine:
    recipe = Recipe(backend=backend, precision=Precision.FP32, compute_capability=CAPABILITY.get(backend))
    options = BuildOptions(profiles=(case.profile,), threads=1)
    out.mkdir(parents=True)
    return backends.backend(backend).build(case.write(out.parent / f"{out.name}-source"), recipe, options, out, lambda fraction, text: None)


@cache
def obstacle(backend: str) -> str:
    """Why no engine of this backend runs here; empty if one does."""
    with TemporaryDirectory() as folder:
        try:
            backends.load(build(backend, several(), Path(folder) / "engine")).close()
        except (BackendUnavailable, UnsupportedError) as error:
            return error.message
    return ""


@pytest.fixture(params=GRAPH_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if why := obstacle(name):
        pytest.skip(f"{name}: {why}")
    return name


Open = Callable[[Case], Loaded]


@pytest.fixture
def load(backend: str, tmp_path: Path) -> Iterator[Open]:
    """Builds and loads a case, and closes it after the test."""
    with ExitStack() as stack:
        yield lambda case: stack.enter_context(closing(backends.load(build(backend, case, tmp_path / "engine"))))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_answers_as_the_reference(load: Open, case: Case) -> None:
    with closing(load(case).session()) as session:
        for feeds in case.feeds:
            expected, got = case.expected(feeds), run_session(session, feeds)
            assert list(got) == [spec.name for spec in session.outputs] == list(expected)
            for name in expected:
                assert got[name].dtype == expected[name].dtype
                assert got[name].shape == expected[name].shape
                np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-5)


def test_has_the_interface_of_the_model(load: Open, tmp_path: Path) -> None:
    case = two_symbols()
    model = case.write(tmp_path / "again")
    with closing(load(case).session()) as session:
        assert (session.inputs, session.outputs) == (model.inputs, model.outputs)


@pytest.mark.parametrize(
    ("feeds", "said"),
    [
        ({"x": ramp(2, 3)}, ["expected inputs 'x', 'mask'", "got 'x'"]),
        ({"x": ramp(2, 3), "mask": ramp(2, 3, dtype="int64"), "z": ramp(1)}, ["got 'x', 'mask', 'z'"]),
        ({"x": ramp(2, 3, dtype="float64"), "mask": ramp(2, 3, dtype="int64")}, ["'x' has dtype float64", "expected float32"]),
        ({"x": ramp(2, 3).astype(">f4"), "mask": ramp(2, 3, dtype="int64")}, ["'x' has dtype >f4", "expected float32"]),
        ({"x": ramp(6), "mask": ramp(2, 3, dtype="int64")}, ["'x' has rank 1", "expected rank 2"]),
        ({"x": ramp(2, 3), "mask": ramp(2, 4, dtype="int64")}, ["'sequence' = 4", "gives 3"]),
        ({"x": ramp(2, 17), "mask": ramp(2, 17, dtype="int64")}, ["sequence = 17", "sequence from 1 to 16"]),
        ({"x": ramp(0, 3), "mask": ramp(0, 3, dtype="int64")}, ["batch = 0", "batch from 1 to 4"]),
        ({"x": [[1.0, 2.0]], "mask": ramp(1, 2, dtype="int64")}, ["'x' is a list", "expected a numpy array"]),
    ],
)
def test_refuses_wrong_feeds_with_expected_and_actual(load: Open, feeds: Tensors, said: list[str]) -> None:
    good = two_symbols()
    with closing(load(good).session()) as session:
        run_session(session, good.feeds[1])
        with pytest.raises(DataError) as caught:
            session.bind(feeds)
        assert all(text in caught.value.message for text in said)
        assert caught.value.next_step
        np.testing.assert_array_equal(run_session(session, good.feeds[0])["y"], good.expected(good.feeds[0])["y"])  # and goes on


def test_refuses_a_wrong_fixed_dimension(load: Open) -> None:
    with closing(load(convolution()).session()) as session, pytest.raises(DataError, match=r"shape \(1, 4, 8, 8\), expected"):
        session.bind({"image": ramp(1, 4, 8, 8)})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_caller_owns_the_outputs(load: Open, case: Case) -> None:
    with closing(load(case).session()) as session:
        feeds = {name: array.copy() for name, array in case.feeds[0].items()}
        first = run_session(session, feeds)
        kept = {name: array.copy() for name, array in first.items()}
        second = run_session(session, {name: np.zeros_like(array) for name, array in feeds.items()})
        for array in second.values():
            array[...] = 1  # may be written
        third = run_session(session, feeds)
    for name, array in kept.items():
        np.testing.assert_array_equal(first[name], array)
        np.testing.assert_array_equal(third[name], array)
        assert not any(np.shares_memory(first[name], feed) for feed in feeds.values())


def test_takes_arrays_that_are_not_contiguous_or_not_writable(load: Open) -> None:
    case = convolution()
    image = case.feeds[1]["image"]
    strided = np.ascontiguousarray(image.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    frozen = image.copy()
    frozen.flags.writeable = False
    with closing(load(case).session()) as session:
        expected = run_session(session, {"image": image})["logits"]
        for feed in (strided, frozen):
            np.testing.assert_allclose(run_session(session, {"image": feed})["logits"], expected, rtol=1e-6)


def test_two_sessions_are_independent(load: Open) -> None:
    case = convolution()
    loaded = load(case)
    small, large = case.feeds[0], case.feeds[2]
    with closing(loaded.session()) as one, closing(loaded.session()) as other:
        one.bind(small)
        other.bind(large)
        for session in (one, other):
            session.upload()
            session.execute()
        for session in (one, other):
            session.download()
            session.synchronize()
        got = one.fetch()["logits"], other.fetch()["logits"]
    for logits, feeds in zip(got, (small, large), strict=True):
        np.testing.assert_allclose(logits, case.expected(feeds)["logits"], rtol=1e-5, atol=1e-5)


def test_a_session_outlives_its_sibling(load: Open) -> None:
    case = several()
    loaded = load(case)
    loaded.session().close()
    with closing(loaded.session()) as session:
        assert run_session(session, case.feeds[0])["largest"] == 2


def test_use_after_close_is_a_clear_error(load: Open) -> None:
    case = several()
    loaded = load(case)
    session = loaded.session()
    session.bind(case.feeds[0])
    session.close()
    session.close()  # harmless
    for use in (lambda: session.bind(case.feeds[0]), session.execute):
        with pytest.raises(InternalError, match="closed"):
            use()
    loaded.close()
    with pytest.raises(InternalError, match="closed"):
        loaded.session()


def test_nothing_can_be_fetched_before_a_run(load: Open) -> None:
    case = several()
    with closing(load(case).session()) as session:
        run_session(session, case.feeds[0])
        session.bind(case.feeds[0])
        with pytest.raises(InternalError, match="nothing to fetch"):
            session.fetch()


def test_refuses_a_device_that_it_cannot_use(backend: str, tmp_path: Path) -> None:
    engine = build(backend, several(), tmp_path / "engine")
    with pytest.raises(UnsupportedError, match="'tpu:0'"):
        backends.load(engine, "tpu:0")


def test_a_damaged_engine_is_named(backend: str, tmp_path: Path) -> None:
    engine = build(backend, several(), tmp_path / "engine")
    engine.path.write_bytes(engine.path.read_bytes()[: engine.path.stat().st_size // 2])
    with pytest.raises(StoreError, match=re.escape(str(engine.path))):
        backends.load(engine)


def test_times_a_region(load: Open) -> None:
    case = several()
    with closing(load(case).session()) as session:
        timer = session.timer()
        timer.start()
        run_session(session, case.feeds[0])
        timer.stop()
    assert 0 < timer.elapsed_s() < 60


def test_refuses_an_engine_of_another_host(backend: str, tmp_path: Path) -> None:
    engine = build(backend, several(), tmp_path / "engine")
    foreign = engine.target.model_copy(update={"version": "0.1", "cpu_flags": ("sve2",), "device": "Another CPU"})
    with pytest.raises(BackendUnavailable) as caught:
        backends.load(engine.model_copy(update={"target": foreign}))
    for text in ("0.1", engine.target.version, "sve2", "Another CPU"):
        assert text in caught.value.message
    assert caught.value.next_step


def test_an_engine_holds_all_that_it_needs(backend: str, tmp_path: Path) -> None:
    case = several()
    engine = build(backend, case, tmp_path / "engine")
    moved = engine.root.rename(tmp_path / "elsewhere")
    for file in (tmp_path / "engine-source").iterdir():
        file.unlink()
    assert engine.size_bytes == sum(file.stat().st_size for file in moved.rglob("*") if file.is_file())
    with closing(backends.load(engine.model_copy(update={"root": moved}))) as loaded, closing(loaded.session()) as session:
        assert run_session(session, case.feeds[0])["largest"] == 2


def test_the_same_input_gives_the_same_engine(backend: str, tmp_path: Path) -> None:
    one, again, other = (build(backend, case(), tmp_path / name) for name, case in (("a", several), ("b", several), ("c", convolution)))
    assert one.digest == again.digest != other.digest


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_lacks_no_precision_silently(name: str, tmp_path: Path) -> None:
    """A precision is built, or refused by name."""
    backend = backends.backend(name)
    model = several().write(tmp_path / "source")
    for precision in set(Precision) - backend.PRECISIONS:
        recipe = Recipe(backend=name, precision=precision, compute_capability=CAPABILITY.get(name))
        with pytest.raises(CrucibleError) as caught:
            backend.build(model, recipe, BuildOptions(profiles=()), tmp_path, lambda fraction, text: None)
        assert isinstance(caught.value, BackendUnavailable | UnsupportedError)
        assert caught.value.next_step
