"""What no backend takes, and what one of them does not: each is refused with what was expected and
what came.
"""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pipeline import backends
from pipeline.backends.base import Session, run_session
from pipeline.core.artifacts import BuildOptions
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Tensors
from pipeline.errors import (
    BackendUnavailable,
    CrucibleError,
    DataError,
    ModelError,
    StoreError,
    UnsupportedError,
)
from tests.pipeline.conformance.engines import CAPABILITY, REFUSED, EngineOf, Open, build, copied
from tests.pipeline.conformance.models import (
    Case,
    convolution,
    ramp,
    several,
    takes_a_sequence,
    takes_strings,
    top_k,
    two_profiles,
    two_symbols,
)

# --- models ---


@pytest.mark.parametrize(("name", "case"), REFUSED)
def test_a_model_that_a_backend_does_not_take_is_refused_by_name(
    name: str, case: Case, tmp_path: Path
) -> None:
    try:
        backends.backend(name).probe()
    except BackendUnavailable as error:
        pytest.skip(error.message)
    with pytest.raises(CrucibleError) as refusal:
        build(name, case, tmp_path / "engine")
    assert isinstance(refusal.value, ModelError | UnsupportedError)
    assert re.search(case.refused_by[name], refusal.value.message)
    assert refusal.value.next_step


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (takes_strings(), "input 'x' holds string, expected one of"),
        (takes_a_sequence(), "input 'x' is of kind sequence, expected a tensor"),
    ],
)
def test_what_no_array_holds_is_refused_before_any_backend_is_asked(
    case: Case, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words) as error:
        case.write(tmp_path)
    assert error.value.next_step


MISSING = [
    (name, precision)
    for name in backends.BACKENDS
    for precision in Precision
    if precision not in backends.backend(name).PRECISIONS
]


@pytest.mark.parametrize(("name", "precision"), MISSING)
def test_lacks_no_precision_silently(name: str, precision: Precision, tmp_path: Path) -> None:
    """A precision is built, or refused by name."""
    recipe = Recipe(backend=name, precision=precision, compute_capability=CAPABILITY.get(name))
    with pytest.raises(CrucibleError) as error:
        backends.backend(name).build(
            several().write(tmp_path / "source"),
            recipe,
            BuildOptions(profiles=()),
            tmp_path,
            lambda fraction, text, figures=None: None,
        )
    assert isinstance(error.value, BackendUnavailable | UnsupportedError)
    assert error.value.next_step


# --- feeds ---


@pytest.mark.parametrize(
    ("feeds", "words"),
    [
        ({"x": ramp(2, 3)}, ["expected inputs 'x', 'mask'", "got 'x'"]),
        (
            {"x": ramp(2, 3), "mask": ramp(2, 3, dtype="int64"), "z": ramp(1)},
            ["got 'x', 'mask', 'z'"],
        ),
        (
            {"x": ramp(2, 3, dtype="float64"), "mask": ramp(2, 3, dtype="int64")},
            ["'x' has dtype float64", "expected float32"],
        ),
        (
            {"x": ramp(2, 3).astype(">f4"), "mask": ramp(2, 3, dtype="int64")},
            ["'x' has dtype >f4", "expected float32"],
        ),
        ({"x": ramp(6), "mask": ramp(2, 3, dtype="int64")}, ["'x' has rank 1", "expected rank 2"]),
        ({"x": ramp(2, 3), "mask": ramp(2, 4, dtype="int64")}, ["'sequence' = 4", "gives 3"]),
        (
            {"x": ramp(2, 17), "mask": ramp(2, 17, dtype="int64")},
            ["sequence = 17", "sequence from 1 to 16"],
        ),
        ({"x": ramp(0, 3), "mask": ramp(0, 3, dtype="int64")}, ["batch = 0", "batch from 1 to 4"]),
        (
            {"x": [[1.0, 2.0]], "mask": ramp(1, 2, dtype="int64")},
            ["'x' is a list", "expected a numpy array"],
        ),
    ],
)
def test_refuses_wrong_feeds_with_expected_and_actual(
    load: Open, feeds: Tensors, words: list[str]
) -> None:
    good = two_symbols()
    with closing(load(good).session()) as session:
        run_session(session, good.feeds[1])
        with pytest.raises(DataError) as error:
            session.bind(feeds)
        assert all(text in error.value.message for text in words)
        assert error.value.next_step
        assert_goes_on(session, good)


def test_refuses_a_wrong_fixed_dimension(load: Open) -> None:
    with (
        closing(load(convolution()).session()) as session,
        pytest.raises(DataError, match=r"shape \(1, 4, 8, 8\), expected"),
    ):
        session.bind({"image": ramp(1, 4, 8, 8)})


@pytest.mark.parametrize("size", [(2, 64), (9, 1)])
def test_a_shape_outside_all_profiles_is_refused_with_all_of_them(
    load: Open, size: tuple[int, int]
) -> None:
    case = two_profiles()
    with closing(load(case).session()) as session:
        with pytest.raises(DataError) as error:
            session.bind({"x": ramp(*size), "mask": ramp(*size, dtype="int64")})
        for text in (
            f"batch = {size[0]}, sequence = {size[1]}",
            "batch from 1 to 1, sequence from 1 to 64",
            "batch from 2 to 8, sequence from 1 to 16",
        ):
            assert text in error.value.message
        assert_goes_on(session, case)


@pytest.mark.parametrize("k", [0, 9, -1])
def test_a_value_outside_all_profiles_is_refused(load: Open, k: int) -> None:
    """Also after the same shapes were accepted: TensorRT itself would not notice."""
    case = top_k()
    with closing(load(case).session()) as session:
        run_session(session, case.feeds[1])
        with pytest.raises(DataError) as error:
            session.bind({"x": case.feeds[1]["x"], "k": np.array([k])})
        assert f"k = [{k}]" in error.value.message
        assert "k from [1] to [8]" in error.value.message
        assert_goes_on(session, case)


def assert_goes_on(session: Session, case: Case) -> None:
    """The next request is answered as if nothing had been."""
    for name, expected in case.expected(case.feeds[0]).items():
        np.testing.assert_array_equal(run_session(session, case.feeds[0])[name], expected)


# --- engines and devices ---


@pytest.mark.parametrize("device", ["tpu:0", "dla:0"])
def test_refuses_a_device_that_it_cannot_use(
    backend: str, engine_of: EngineOf, device: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"'{device}'"):
        backends.load(engine_of(backend, several()), device)


def test_a_damaged_engine_is_named(backend: str, engine_of: EngineOf, tmp_path: Path) -> None:
    engine = copied(engine_of(backend, several()), tmp_path / "engine")
    engine.path.write_bytes(engine.path.read_bytes()[: engine.path.stat().st_size // 2])
    with pytest.raises(StoreError, match=re.escape(str(engine.path))):
        backends.load(engine)


def test_refuses_an_engine_of_another_host(backend: str, engine_of: EngineOf) -> None:
    engine = engine_of(backend, several())
    foreign = engine.target.model_copy(
        update={"version": "0.1", "cpu_flags": ("sve2",), "device": "Another CPU"}
    )
    with pytest.raises(BackendUnavailable) as error:
        backends.load(engine.model_copy(update={"target": foreign}))
    for text in ("0.1", engine.target.version, "sve2", "Another CPU"):
        assert text in error.value.message
    assert error.value.next_step
