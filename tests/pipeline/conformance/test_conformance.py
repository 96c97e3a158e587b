"""The same cases on every backend: what a Session promises, whoever runs the graph. A backend that
cannot run here is skipped, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.errors import InternalError
from tests.pipeline.conformance.engines import ON_CPU, RUNS, Open, build
from tests.pipeline.conformance.models import Case, convolution, several, two_symbols


@pytest.mark.parametrize(("backend", "case"), RUNS, indirect=["backend"])
def test_answers_as_the_reference(load: Open, case: Case) -> None:
    with closing(load(case).session()) as session:
        for feeds in case.feeds:
            expected, got = case.expected(feeds), run_session(session, feeds)
            assert list(got) == [spec.name for spec in session.outputs] == list(expected)
            for name in expected:
                assert got[name].dtype == expected[name].dtype
                assert got[name].shape == expected[name].shape
                assert_close(got[name], expected[name])


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal within 1e-5, of bfloat16 within its rounding."""
    least = 2.0**-7 if got.dtype == ml_dtypes.bfloat16 else 1e-5
    np.testing.assert_allclose(
        got.astype(np.float64), expected.astype(np.float64), rtol=least, atol=least
    )


def test_has_the_interface_of_the_model(load: Open, tmp_path: Path) -> None:
    case = two_symbols()
    model = case.write(tmp_path / "again")
    with closing(load(case).session()) as session:
        assert (session.inputs, session.outputs) == (model.inputs, model.outputs)


@pytest.mark.parametrize(("backend", "case"), RUNS, indirect=["backend"])
def test_the_caller_owns_the_outputs(load: Open, case: Case) -> None:
    with closing(load(case).session()) as session:
        feeds = {name: array.copy() for name, array in case.feeds[0].items()}
        first = run_session(session, feeds)
        copies = {name: array.copy() for name, array in first.items()}
        second = run_session(
            session,
            {
                name: array if name in case.valued else np.zeros_like(array)
                for name, array in feeds.items()
            },
        )
        for array in second.values():
            array[...] = 1  # may be written
        third = run_session(session, feeds)
    for name, array in copies.items():
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
            np.testing.assert_allclose(
                run_session(session, {"image": feed})["logits"], expected, rtol=1e-6
            )


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
    uses: list[Callable[[], None]] = [lambda: session.bind(case.feeds[0]), session.execute]
    for use in uses:
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


def test_times_a_region(load: Open) -> None:
    case = several()
    with closing(load(case).session()) as session:
        timer = session.timer()
        timer.start()
        run_session(session, case.feeds[0])
        timer.stop()
    assert 0 < timer.elapsed_s() < 60


def test_an_engine_holds_all_that_it_needs(backend: str, tmp_path: Path) -> None:
    case = several()
    engine = build(backend, case, tmp_path / "engine")
    moved = engine.root.rename(tmp_path / "elsewhere")
    for file in (tmp_path / "engine-source").iterdir():
        file.unlink()
    assert engine.size_bytes == sum(
        file.stat().st_size for file in moved.rglob("*") if file.is_file()
    )
    with (
        closing(backends.load(engine.model_copy(update={"root": moved}))) as loaded,
        closing(loaded.session()) as session,
    ):
        assert run_session(session, case.feeds[0])["largest"] == 2


@pytest.mark.parametrize("backend", ON_CPU, indirect=True)
def test_the_same_input_gives_the_same_engine(backend: str, tmp_path: Path) -> None:
    """Not on a GPU, where kernels are chosen by their times and an engine is named by what came of
    it.
    """
    one, again, other = (
        build(backend, case(), tmp_path / name)
        for name, case in (("a", several), ("b", several), ("c", convolution))
    )
    assert one.digest == again.digest != other.digest
