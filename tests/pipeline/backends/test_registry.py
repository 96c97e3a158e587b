import subprocess
import sys

import numpy as np
import pytest

from pipeline import backends
from pipeline.backends.feed_checks import FeedCheck, installed_version
from pipeline.backends.layer_timing import HostTimer
from pipeline.core.shapes import Profile, TensorSpec
from pipeline.errors import BackendUnavailable, DataError, PlanError


def test_an_unknown_backend_is_named_with_the_near_one() -> None:
    with pytest.raises(PlanError) as error:
        backends.backend("onxruntime")
    assert (error.value.message, error.value.next_step) == (
        "unknown backend 'onxruntime'",
        "did you mean 'onnxruntime'?",
    )
    with pytest.raises(PlanError, match="choose one of onnxruntime, openvino"):
        backends.backend("zzz")


def test_the_registry_loads_no_heavy_library() -> None:
    heavy = ("torch", "onnxruntime", "openvino", "nncf", "tensorrt", "tensorrt_rtx")
    code = f"""
import sys
from pipeline.backends import BACKENDS, backend
for name in BACKENDS:
    assert backend(name).DISTRIBUTIONS
print([name for name in {heavy} if name in sys.modules])"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_contestant_imports_its_own_backend_only() -> None:
    code = """
import sys
import pipeline.benchmark.interleaved
from pipeline.backends import backend
backend("onnxruntime")
others = ("openvino.backend", "pytorch.backend", "tensorrt.backend", "tensorrt.rtx")
print([name for name in others if f"pipeline.backends.{name}" in sys.modules])"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_missing_package_names_what_to_install() -> None:
    with pytest.raises(BackendUnavailable) as error:
        installed_version("no-such-package-here", "pip install it")
    assert "`no-such-package-here` is not installed" in error.value.message
    assert error.value.next_step == "pip install it"


def test_feeds_fit_any_one_profile() -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", "length"), kind="dynamic")
    profiles = tuple(
        Profile(dims={"batch": batch, "length": length})
        for batch, length in (((1, 1, 1), (1, 64, 512)), ((1, 8, 64), (1, 32, 32)))
    )
    check = FeedCheck((spec,), profiles)
    for shape in ((1, 512), (64, 32)):
        check({"x": np.zeros(shape, np.float32)})
    with pytest.raises(DataError) as error:
        check({"x": np.zeros((64, 512), np.float32)})
    assert "batch = 64, length = 512" in error.value.message
    assert (
        "batch from 1 to 1, length from 1 to 512; or batch from 1 to 64, length from 1 to 32"
        in error.value.message
    )


def test_feeds_fit_one_profile_by_their_values_too() -> None:
    specs = (
        TensorSpec(name="x", dtype="float32", shape=("n",)),
        TensorSpec(name="k", dtype="int64", shape=(1,)),
    )
    ranges = (({"n": [1, 4, 8]}, [1, 2, 4]), ({"n": [9, 16, 64]}, [1, 8, 16]))
    check = FeedCheck(
        specs,
        tuple(Profile.model_validate({"dims": dims, "values": {"k": k}}) for dims, k in ranges),
    )
    feeds = {"x": np.zeros(8, np.float32), "k": np.array([4])}
    check(feeds)
    for k in (5, 16):  # of this shape, or of the other profile
        feeds["k"][0] = k  # the same array, so that only its value differs from what was accepted
        for _ in range(2):
            with pytest.raises(DataError) as error:
                check(feeds)
            assert f"no profile of this engine holds n = 8, k = [{k}]" in error.value.message
            assert (
                "n from 1 to 8, k from [1] to [4]; or n from 9 to 64, k from [1] to [16]"
                in error.value.message
            )
    feeds["k"][0] = 1
    check(feeds)
    with pytest.raises(DataError, match="'k' is a list"):
        check({**feeds, "k": [1]})


def test_a_refused_feed_is_refused_again() -> None:
    check = FeedCheck((TensorSpec(name="x", dtype="bool", shape=(2,)),), ())
    for _ in range(2):
        with pytest.raises(DataError, match="dtype int64, expected bool"):
            check({"x": np.zeros(2, np.int64)})


def test_a_model_without_inputs_takes_no_feeds() -> None:
    check = FeedCheck((), ())
    check({})
    with pytest.raises(DataError, match="expected inputs none, got 'x'"):
        check({"x": np.zeros(2)})


def test_the_timer_measures_between_start_and_stop() -> None:
    timer = HostTimer()
    timer.start()
    sum(range(10_000))
    timer.stop()
    first = timer.elapsed_s()
    assert first > 0
    assert timer.elapsed_s() == first
