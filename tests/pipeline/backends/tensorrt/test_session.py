"""Sessions of TensorRT on doubles of CUDA and TensorRT; test_session_gpu.py asks the same of a
GPU.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pipeline import backends
from pipeline.backends import cuda
from pipeline.backends.base import run_session
from pipeline.backends.tensorrt.memory import run_error
from pipeline.backends.tensorrt.messages import MAX_MESSAGES, logger_of, messages_of
from pipeline.backends.tensorrt.session import GRAPHS, Recent, TrtSession
from pipeline.core.shapes import Profile, Tensors, TensorSpec
from pipeline.errors import DataError, HostError, InternalError, UnsupportedError
from pipeline.results.gpu_cost import GpuCost
from tests.pipeline.backends.cuda_double import CudaDouble, Error
from tests.pipeline.backends.tensorrt.builders import (
    DOUBLE,
    POSITIONS,
    WHERE,
    Bench,
    X,
    Y,
    doubled,
    feeds,
)
from tests.pipeline.backends.tensorrt.trt_double import Arrays, Program


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def check_runs(session: object, *batches: Tensors) -> None:
    for batch in batches:
        outputs = run_session(session, batch)  # type: ignore[arg-type]
        np.testing.assert_array_equal(outputs["y"], doubled(dict(batch))["y"])


def test_runs_and_captures_a_shape_at_its_second_run(bench: Bench) -> None:
    with closing(bench.load(bench.engine())) as loaded, closing(loaded.session()) as session:
        captured = []
        for start in range(4):
            check_runs(session, feeds(3, start))
            captured.append((session.graphs, bench.cuda.launches))
    assert captured == [(0, 0), (1, 0), (1, 1), (1, 2)]  # plain, captured, launched, launched
    assert session.graph_refusal == ""


def test_shapes_are_replayed_after_eviction(bench: Bench) -> None:
    with closing(bench.load(bench.engine())) as loaded, closing(loaded.session()) as session:
        for _ in range(3):
            for rows in range(1, GRAPHS + 4):
                check_runs(session, *[feeds(rows, start) for start in (1, 5, 7)])
                assert session.graphs <= GRAPHS
        assert bench.trt.contexts == GRAPHS + 1 == len(bench.cuda.graphs) + 1


def test_two_replays_with_different_inputs_share_no_output(bench: Bench) -> None:
    with closing(bench.load(bench.engine())) as loaded, closing(loaded.session()) as session:
        outputs = [run_session(session, feeds(2, start))["y"] for start in range(5)]
    for start, output in enumerate(outputs):
        np.testing.assert_array_equal(output, doubled(dict(feeds(2, start)))["y"])
        assert output.flags.owndata


def test_lent_outputs_are_those_of_fetch_and_the_next_run_overwrites_them(bench: Bench) -> None:
    with closing(bench.load(bench.engine())) as loaded, closing(loaded.session()) as session:
        first = run_session(session, feeds(2))["y"]
        lent = session.lent_outputs()["y"]
        np.testing.assert_array_equal(lent, first)
        second = run_session(session, feeds(2, 10))["y"]
        np.testing.assert_array_equal(lent, second)
        np.testing.assert_array_equal(first, doubled(dict(feeds(2)))["y"])


def test_what_is_bound_next_does_not_reach_a_run_in_flight(bench: Bench) -> None:
    with closing(bench.load(bench.engine())) as loaded, closing(loaded.session()) as session:
        check_runs(session, feeds(2))
        session.bind(feeds(2, 10))
        session.upload()
        session.execute()
        session.download()
        session.bind(feeds(2, 20))  # waits
        with pytest.raises(InternalError, match="nothing to fetch"):
            session.fetch()
        session.upload()
        session.execute()
        session.download()
        np.testing.assert_array_equal(
            session.fetch()["y"], doubled(dict(feeds(2, 20)))["y"]
        )  # waits too


def test_repeats_a_step_without_a_new_bind(bench: Bench) -> None:
    with closing(bench.load(bench.engine())) as loaded, closing(loaded.session()) as session:
        session.bind(feeds(2, 1))
        session.upload()
        for _ in range(4):
            session.execute()
        session.enqueue()
        session.download()
        session.synchronize()
        np.testing.assert_array_equal(session.fetch()["y"], doubled(dict(feeds(2, 1)))["y"])
        assert session.graphs == 1


def test_no_graphs_if_none_are_wanted(bench: Bench) -> None:
    with (
        closing(bench.load(bench.engine())) as loaded,
        closing(loaded.session(graphs=False)) as session,
    ):
        check_runs(session, feeds(1), feeds(1, 2), feeds(1, 3))
        assert (session.graphs, session.graph_refusal, bench.cuda.launches) == (0, "", 0)
        assert session.context.shapes["x"] == (1, 2)


def test_an_engine_that_cannot_be_captured_says_why_and_runs_plain(bench: Bench) -> None:
    refusing = Program(
        **{**vars(DOUBLE), "capture_error": "operation not permitted when stream is capturing"}
    )
    with (
        closing(bench.load(bench.engine(refusing))) as loaded,
        closing(loaded.session()) as session,
    ):
        check_runs(session, *[feeds(rows, 3) for rows in (1, 1, 1, 2, 2)])
        assert (
            session.graph_refusal
            == "TensorRT cannot run the engine: operation not permitted when stream is capturing"
        )
        assert (session.graphs, bench.trt.contexts) == (0, 1)


def test_an_empty_batch(bench: Bench) -> None:
    with closing(bench.load(bench.engine())) as loaded, closing(loaded.session()) as session:
        check_runs(session, feeds(2), feeds(0), feeds(0), feeds(0), feeds(2))
        assert run_session(session, feeds(0))["y"].shape == (0, 2)


# -- profiles, values --------------------------------------------------------


def test_each_shape_runs_in_the_profile_that_is_preferred_or_tuned_nearest(bench: Bench) -> None:
    profiles = tuple(Profile(dims={"n": dims}) for dims in ([1, 2, 16], [1, 8, 64]))
    program = Program(**{**vars(DOUBLE), "profiles": 2})
    with closing(bench.load(bench.engine(program, profiles=profiles))) as loaded:
        for preferred, taken in (
            (None, {1: 0, 3: 0, 5: 1, 16: 1, 64: 1}),
            (0, {1: 0, 5: 0, 16: 0, 64: 1}),
            (1, {1: 1, 5: 1, 16: 1, 64: 1}),
        ):
            with closing(loaded.session(preferred)) as session:
                for rows, profile in taken.items():
                    check_runs(session, feeds(rows), feeds(rows, 1), feeds(rows, 2))
                    assert session.context.profile == profile
                with pytest.raises(DataError, match=r"n from 1 to 16.*or.*n from 1 to 64"):
                    session.bind(feeds(65))
        with pytest.raises(UnsupportedError, match="expected a profile from 0 to 1, got 2"):
            loaded.session(2)


def test_values_that_decide_a_shape_are_read_on_the_cpu(bench: Bench) -> None:
    count = TensorSpec(name="k", dtype="int64", shape=(1,))
    tiled = Program(
        inputs={"x": ("FLOAT", (2,)), "k": ("INT64", (1,))},
        outputs={"y": "FLOAT"},
        run=lambda arrays: {"y": np.tile(arrays["x"], (int(arrays["k"][0]), 1))},
        shapes=lambda shapes, host: {"y": (int(host["k"][0]), 2)},
        host_inputs=("k",),
    )
    profile = Profile(values={"k": [[1], [2], [5]]})
    x, y = X.model_copy(update={"shape": (2,)}), Y.model_copy(update={"kind": "data-dependent"})
    with (
        closing(bench.load(bench.engine(tiled, (x, count), (y,), (profile,)))) as loaded,
        closing(loaded.session()) as session,
    ):
        for rows in (1, 5, 5, 2, 1):
            got = run_session(session, {"x": np.ones(2, np.float32), "k": np.array([rows])})["y"]
            np.testing.assert_array_equal(got, np.ones((rows, 2)))
        assert "'k' on the CPU" in session.graph_refusal
        with pytest.raises(DataError, match=r"k"):
            session.bind({"x": np.ones(2, np.float32), "k": np.array([6])})


def test_values_and_shapes_that_do_not_fit_together_are_refused_in_tensorrts_words(
    bench: Bench,
) -> None:
    """As the largest of the profile do here: then memory grows when it is needed."""

    def reshaped(
        shapes: Mapping[str, tuple[int, ...]], host: Arrays
    ) -> Mapping[str, tuple[int, ...]]:
        if shapes["x"][0] * 2 != host["k"][0]:
            raise ValueError("reshape changes volume")
        return {"y": (int(host["k"][0]),)}

    program = Program(
        inputs={"x": ("FLOAT", (-1, 2)), "k": ("INT64", (1,))},
        outputs={"y": "FLOAT"},
        run=lambda arrays: {"y": arrays["x"].reshape(-1)},
        shapes=reshaped,
        host_inputs=("k",),
    )
    k, profile = (
        TensorSpec(name="k", dtype="int64", shape=(1,)),
        Profile(dims={"n": [1, 50, 100]}, values={"k": [2, 100, 300]}),
    )
    y = Y.model_copy(update={"shape": ("m",)})
    with (
        closing(bench.load(bench.engine(program, (X, k), (y,), (profile,)))) as loaded,
        closing(loaded.session()) as session,
    ):
        for rows in (1, 100, 2):
            got = run_session(
                session, {"x": np.full((rows, 2), rows, np.float32), "k": np.array([rows * 2])}
            )["y"]
            np.testing.assert_array_equal(got, np.full(rows * 2, rows))
            with pytest.raises(
                DataError, match=r"TensorRT refuses x \(3, 2\), k \(1,\): reshape changes volume\n"
            ):
                session.bind({"x": np.zeros((3, 2), np.float32), "k": np.array([7])})
            with pytest.raises(InternalError, match="nothing is bound"):
                session.execute()
            with pytest.raises(InternalError, match="nothing to fetch"):
                session.fetch()


def test_a_shape_that_tensorrt_refuses(bench: Bench) -> None:
    program = Program(
        **{
            **vars(DOUBLE),
            "shape_error": (
                "IExecutionContext::setInputShape: Error Code 3: API Usage Error (no such shape)"
            ),
        }
    )
    with closing(bench.load(bench.engine(program))) as loaded, closing(loaded.session()) as session:
        with pytest.raises(
            DataError, match=r"TensorRT refuses x \(13, 2\), flag \(\): no such shape"
        ):
            session.bind(feeds(13))
        check_runs(session, feeds(3))


def test_an_output_on_the_cpu_is_refused(bench: Bench) -> None:
    with (
        closing(
            bench.load(bench.engine(Program(**{**vars(DOUBLE), "host_outputs": ("y",)})))
        ) as loaded,
        pytest.raises(UnsupportedError, match="computes output 'y' on the CPU"),
    ):
        loaded.session()
    assert bench.cuda.streams == {}


def test_outputs_sized_by_values_run_plain(bench: Bench) -> None:
    with (
        closing(bench.load(bench.engine(POSITIONS, (X,), (WHERE,)))) as loaded,
        closing(loaded.session()) as session,
    ):
        assert "'where' depends on values" in session.graph_refusal
        for rows in (1, 16, 0, 2, 2):
            x = np.ones((rows, 2), np.float32)
            np.testing.assert_array_equal(
                run_session(session, {"x": x})["where"], np.stack(np.nonzero(x))
            )
        assert run_session(session, {"x": np.zeros((3, 2), np.float32)})["where"].shape == (2, 0)


def test_an_output_larger_than_at_the_largest_shape_makes_memory_grow(bench: Bench) -> None:
    shrinking = Program(
        inputs={"x": ("FLOAT", (-1, 2))},
        outputs={"y": "FLOAT"},
        run=lambda arrays: {
            "y": np.full((2000 - 100 * len(arrays["x"]), 2), arrays["x"].sum(), np.float32)
        },
        shapes=lambda shapes, host: {"y": (2000 - 100 * shapes["x"][0], 2)},
    )
    with (
        closing(bench.load(bench.engine(shrinking, (X,)))) as loaded,
        closing(loaded.session()) as session,
    ):
        for rows in (16, 16, 16, 1, 1, 1, 16, 16, 16):
            x = np.full((rows, 2), rows, np.float32)
            np.testing.assert_array_equal(
                run_session(session, {"x": x})["y"],
                np.full((2000 - 100 * rows, 2), 2 * rows * rows),
            )
        assert session.graphs == 2


def test_an_input_that_is_an_output_too_is_found_under_its_other_name(bench: Bench) -> None:
    through = Program(
        inputs={"__x": ("FLOAT", (-1, 2))},
        outputs={"y": "FLOAT", "x": "FLOAT"},
        run=lambda arrays: {"y": -arrays["__x"], "x": arrays["__x"]},
        shapes=lambda shapes, host: {"y": shapes["__x"], "x": shapes["__x"]},
    )
    unused = TensorSpec(name="unused", dtype="float32", shape=(1,))
    engine = bench.engine(through, (X, unused), (Y, X))
    with closing(bench.load(engine)) as loaded, closing(loaded.session()) as session:
        got = run_session(
            session, {"x": np.ones((3, 2), np.float32), "unused": np.zeros(1, np.float32)}
        )
    np.testing.assert_array_equal(got["x"], -got["y"])


# -- large inputs ------------------------------------------------------------

WIDE = Program(
    inputs={"x": ("FLOAT", (-1, 1 << 10))},
    outputs={"y": "FLOAT"},
    run=lambda arrays: {"y": arrays["x"] * 2},
    shapes=lambda shapes, host: {"y": shapes["x"]},
)
ROWS = 1000  # of 4 KiB: large


@pytest.fixture
def wide(bench: Bench) -> Iterator[tuple[Bench, TrtSession]]:
    x, y = (each.model_copy(update={"shape": ("n", 1 << 10)}) for each in (X, Y))
    profile = Profile(dims={"n": [0, 2, ROWS]})
    engine = bench.engine(WIDE, (x,), (y,), (profile,))
    with closing(bench.load(engine)) as loaded, closing(loaded.session()) as session:
        yield bench, session


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 1 << 10), dtype=np.float32)


def run_bound(session: TrtSession) -> Tensors:
    """Run once more on what is bound."""
    session.upload()
    session.execute()
    session.download()
    return session.fetch()


def test_large_inputs_of_every_kind_arrive(wide: tuple[Bench, TrtSession]) -> None:
    _, session = wide
    for seed in range(3):
        for x in (
            rows(ROWS, seed),
            rows(ROWS // 2, seed),
            rows(2, seed),
            rows(2 * ROWS, seed)[::2],
            np.asfortranarray(rows(ROWS, seed)),
        ):
            np.testing.assert_array_equal(run_session(session, {"x": x})["y"], x * 2)


def test_a_large_input_travels_with_bind_and_again_with_every_further_upload(
    wide: tuple[Bench, TrtSession],
) -> None:
    bench, session = wide
    stream = next(iter(bench.cuda.streams.values()))
    x = rows(ROWS)
    session.bind({"x": x})
    assert len(stream.waiting) > 1  # chunks
    session.bind({"x": x + 1})  # waits for those
    session.bind({"x": x})
    x[...] = 0  # it was copied
    for _ in range(3):
        np.testing.assert_array_equal(run_bound(session)["y"], rows(ROWS) * 2)


def test_page_locked_memory_is_read_by_every_upload_without_a_copy(
    wide: tuple[Bench, TrtSession],
) -> None:
    bench, session = wide
    locked = len(bench.cuda.pinned)
    x = cuda.page_locked_array(bench.cuda, (ROWS, 1 << 10), np.dtype(np.float32))
    assert len(bench.cuda.pinned) == locked + 1
    session.bind({"x": x})
    for seed in range(3):
        x[...] = rows(ROWS, seed)
        np.testing.assert_array_equal(run_bound(session)["y"], rows(ROWS, seed) * 2)
    half = x[: ROWS // 2]  # a part of it is page-locked as well
    np.testing.assert_array_equal(run_session(session, {"x": half})["y"], half * 2)
    session.bind({"x": x})
    del x, half
    gc.collect()
    session.upload()  # the session still refers to it
    session.synchronize()
    run_session(session, {"x": rows(1)})
    gc.collect()
    assert len(bench.cuda.pinned) == locked


def test_memory_that_was_locked_afterwards_is_read_without_a_copy(
    wide: tuple[Bench, TrtSession],
) -> None:
    bench, session = wide
    stream = next(iter(bench.cuda.streams.values()))
    x = rows(ROWS)
    unlock = cuda.page_lock(bench.cuda, x.reshape(-1).view(np.uint8))
    session.bind({"x": x})
    assert stream.waiting == []
    np.testing.assert_array_equal(run_session(session, {"x": x})["y"], x * 2)
    unlock()
    np.testing.assert_array_equal(run_session(session, {"x": x})["y"], x * 2)
    with pytest.raises(HostError, match=r"cannot lock 1\.00 GiB of its memory"):
        cuda.page_locked_array(bench.cuda, (1 << 30,), np.dtype(np.int8))


def test_outputs_can_stay_on_the_gpu(bench: Bench) -> None:
    with closing(bench.load(bench.engine())) as loaded, closing(loaded.session()) as session:
        for start in range(3):
            session.bind(feeds(3, start))
            with pytest.raises(InternalError, match="nothing to fetch"):
                session.device_outputs()
            session.upload()
            session.execute()
            output = session.device_outputs()["y"]
            interface = output.__cuda_array_interface__
            assert (interface["shape"], interface["typestr"]) == ((3, 2), "<f4")
            content = ctypes.string_at(interface["data"][0], 3 * 2 * 4)
            expected = doubled(dict(feeds(3, start)))["y"]
            assert content == expected.astype(np.float32).tobytes()
    half = Program(**{**vars(DOUBLE), "outputs": {"y": "BF16"}})
    y = Y.model_copy(update={"dtype": "bfloat16"})
    with (
        closing(bench.load(bench.engine(half, outputs=(y,)))) as loaded,
        closing(loaded.session()) as session,
    ):
        run_session(session, feeds(2))
        with pytest.raises(UnsupportedError, match="'y' is bfloat16, which cannot be shared"):
            session.device_outputs()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("z", (1, 2), "there is no input 'z', expected one of 'x', 'flag'"),
        ("x", (1, 3), r"input 'x' has shape \(1, 3\), expected"),
        ("x", (2,), "input 'x' has rank 1"),
        ("x", (-1, 2), r"input 'x' cannot have the shape \(-1, 2\)"),
    ],
)
def test_an_input_buffer_that_fits_no_input(
    bench: Bench, name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        backends.input_buffer(bench.engine(), name, shape)


# -- memory ------------------------------------------------------------------


def test_two_sessions_hold_one_copy_of_the_weights(bench: Bench) -> None:
    program = Program(**{**vars(DOUBLE), "weights_bytes": 64 << 20})
    with closing(bench.load(bench.engine(program))) as loaded, closing(loaded.session()) as one:
        with_one = bench.cuda.used
        with closing(loaded.session()) as other:
            assert bench.cuda.used - with_one < program.weights_bytes // 16
            check_runs(one, feeds(2), feeds(2, 1))
            check_runs(other, feeds(3), feeds(3, 1))


def test_weights_are_what_one_more_copy_takes_and_activations_what_contexts_share(
    bench: Bench,
) -> None:
    with closing(bench.load(bench.engine())) as loaded, closing(loaded.session()) as session:
        before = bench.cuda.used
        assert session.gpu_memory() == GpuCost(
            weights_bytes=DOUBLE.weights_bytes, activation_bytes=DOUBLE.activation_bytes
        )
        assert bench.cuda.used == before
        check_runs(session, feeds(2))


def test_without_memory_for_a_copy_the_weights_are_not_known(bench: Bench) -> None:
    with closing(bench.load(bench.engine())) as loaded, closing(loaded.session()) as session:
        bench.cuda.cudaMalloc(bench.cuda.total - bench.cuda.used - 1000)
        cost = session.gpu_memory()
        assert cost.weights_bytes is None
        assert cost.activation_bytes == DOUBLE.activation_bytes
        assert "the GPU is out of memory" in cost.missing["weights"]
        check_runs(session, feeds(2))


def test_everything_is_given_back_at_close(bench: Bench) -> None:
    engine = bench.engine()
    for _ in range(50):
        loaded = bench.load(engine)
        session = loaded.session()
        check_runs(session, *[feeds(rows) for rows in (1, 1, 1, 2, 2)])
        timer = session.timer()
        timer.start()
        timer.stop()
        session.close()
        loaded.close()
        timer.close()
    assert (
        bench.cuda.used,
        bench.cuda.pinned,
        bench.cuda.streams,
        bench.cuda.events,
        bench.cuda.graphs,
    ) == (0, {}, {}, [], [])


def test_closing_the_engine_closes_its_sessions(bench: Bench) -> None:
    loaded = bench.load(bench.engine())
    closed_before, still_open = loaded.session(), loaded.session()
    closed_before.close()
    check_runs(still_open, feeds(2), feeds(2))
    loaded.close()
    loaded.close()  # harmless
    assert bench.cuda.used == 0
    uses: list[Callable[[], object]] = [
        loaded.session,
        lambda: loaded.cuda_engine,
        lambda: still_open.bind(feeds(2)),
        lambda: still_open.context,
        *[
            getattr(still_open, step)
            for step in (
                "upload",
                "execute",
                "enqueue",
                "download",
                "synchronize",
                "fetch",
                "lent_outputs",
                "timer",
            )
        ],
    ]
    for use in uses:
        with pytest.raises(InternalError, match="closed"):
            use()


def test_what_is_dropped_without_close_is_freed_with_it(bench: Bench) -> None:
    loaded = bench.load(bench.engine())
    dropped = weakref.ref(loaded)
    check_runs(loaded.session(), feeds(2), feeds(2))
    del loaded
    gc.collect()
    assert dropped() is None
    assert bench.cuda.used == 0


def test_out_of_memory_is_an_error_of_its_own_kind_and_the_next_request_works(bench: Bench) -> None:
    engine = bench.engine()
    with closing(bench.load(engine)) as loaded, closing(loaded.session()) as session:
        check_runs(session, feeds(2))
        _, filler = bench.cuda.cudaMalloc(bench.cuda.total - bench.cuda.used - 1000)
        for request in (loaded.session, lambda: bench.load(engine)):
            streams = len(bench.cuda.streams)
            with pytest.raises(
                HostError,
                match=r"the GPU is out of memory: requested .*, 0\.0 MiB of 256\.0 MiB are free",
            ) as error:
                request()
            assert error.value.code == "host.out_of_device_memory"
            assert error.value.next_step
            assert len(bench.cuda.streams) == streams
        check_runs(session, feeds(2), feeds(2))  # no memory for the context of a graph: runs plain
        assert "out of memory" in session.graph_refusal
        bench.cuda.cudaFree(filler)
        with closing(loaded.session()) as another:
            check_runs(another, feeds(2), feeds(2), feeds(2))
            assert another.graphs == 1


def test_out_of_memory_for_an_output_sized_by_values(bench: Bench) -> None:
    profile = Profile(dims={"n": [0, 2, 1 << 20]})
    with (
        closing(bench.load(bench.engine(POSITIONS, (X,), (WHERE,), (profile,)))) as loaded,
        closing(loaded.session()) as session,
    ):
        run_session(session, {"x": np.ones((2, 2), np.float32)})
        _, filler = bench.cuda.cudaMalloc(bench.cuda.total - bench.cuda.used - 10_000)
        with pytest.raises(HostError, match=r"out of memory: requested 1\.0 MiB"):
            run_session(session, {"x": np.ones((1 << 15, 2), np.float32)})
        assert (
            messages_of(bench.trt) == []
        )  # TensorRT's own of the same would be told with the next error
        np.testing.assert_array_equal(
            run_session(session, {"x": np.ones((1, 2), np.float32)})["where"], [[0, 0], [0, 1]]
        )
        bench.cuda.cudaFree(filler)
        assert run_session(session, {"x": np.ones((1 << 15, 2), np.float32)})["where"].shape == (
            2,
            1 << 16,
        )


# -- errors ------------------------------------------------------------------


def test_a_run_that_tensorrt_refuses(bench: Bench) -> None:
    broken = Program(
        **{
            **vars(DOUBLE),
            "run_error": (
                "IExecutionContext::enqueueV3: Error Code 7: Internal Error (the tactic is missing)"
            ),
        }
    )
    with closing(bench.load(bench.engine(broken))) as loaded, closing(loaded.session()) as session:
        session.bind(feeds(2))
        with pytest.raises(
            HostError, match="TensorRT cannot run the engine: the tactic is missing\n"
        ):
            session.execute()
        with pytest.raises(InternalError, match="nothing to fetch"):
            session.download()


def test_an_error_of_a_kernel_is_raised_where_it_is_awaited(bench: Bench) -> None:
    with closing(bench.load(bench.engine())) as loaded, closing(loaded.session()) as session:
        bench.cuda.fault = Error.cudaErrorIllegalAddress
        with pytest.raises(HostError, match="cudaErrorIllegalAddress") as error:
            run_session(session, feeds(2))
        assert "start it again" in error.value.next_step
    assert not bench.cuda.device  # closing works all the same


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (
            "IExecutionContext::enqueueV3: Error Code 1: Cuda Runtime (out of memory)",
            "host.out_of_device_memory",
            "256.0 MiB of 256.0 MiB are free",
        ),
        (
            "x: Error Code 2: OutOfMemory (Requested size was 3221225472 bytes.)",
            "host.out_of_device_memory",
            "requested 3.00 GiB",
        ),
        (
            "x::y: Error Code 1: Cuda Runtime (invalid resource handle)",
            "host.cuda",
            "TensorRT fails: an older error; invalid resource handle",
        ),
    ],
)
def test_errors_of_tensorrt_by_their_words(text: str, code: str, message: str) -> None:
    messages = [("ERROR", "an older error"), ("ERROR", text), ("WARNING", "a warning")]
    error = run_error(CudaDouble(), messages, "fails")
    assert error.code == code
    assert message in error.message
    assert messages == []
    assert "does not say why" in run_error(CudaDouble(), messages, "fails").message


def test_a_library_that_warns_in_every_run_fills_no_memory(bench: Bench) -> None:
    bench.engine()
    for number in range(MAX_MESSAGES + 10):
        logger_of(bench.trt).log(bench.trt.ILogger.WARNING, str(number))
    texts = [text for _, text in messages_of(bench.trt)]
    assert texts == [str(number) for number in range(10, MAX_MESSAGES + 10)]


def test_recent_values_are_kept_and_the_others_evicted() -> None:
    evicted: list[str] = []
    recent: Recent[str, str] = Recent(2, evicted.append)
    for key in "ab":
        recent.put(key, key.upper())
    assert recent.get("a") == "A"  # now b is the oldest
    recent.put("c", "C")
    assert (recent.get("b"), evicted, recent.values()) == (None, ["B"], ("A", "C"))
    recent.clear()
    assert (evicted, recent.values()) == (["B", "C", "A"], ())
