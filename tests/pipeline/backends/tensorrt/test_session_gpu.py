"""Sessions of TensorRT on a GPU: what only the real libraries can show. Every engine is built
once.
"""

from __future__ import annotations

import mmap
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from pipeline import backends
from pipeline.backends import cuda
from pipeline.backends.base import run_session
from pipeline.backends.tensorrt.session import GRAPHS, TrtLoaded, TrtSession
from pipeline.core.artifacts import BuildOptions, Engine
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Profile, Tensors
from pipeline.errors import DataError, HostError, StoreError
from tests.pipeline.conformance.models import (
    Case,
    branches,
    convolution,
    model,
    positions,
    ramp,
    two_profiles,
    two_symbols,
)

pytestmark = pytest.mark.gpu
MIB = 1 << 20
WEIGHTS_BYTES = 64 * MIB


WIDE, WIDE_ROWS = 4096, 1000  # 16 MB


@cache
def wide() -> Case:
    """y = 2x, with inputs that several threads copy."""
    proto = model(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        [("x", "float32", ("n", WIDE))],
        [("y", "float32", ("n", WIDE))],
        {},
    )
    profile = Profile(dims={"n": [1, 2, WIDE_ROWS]})
    return Case("wide", proto, (profile,), ({"x": np.ones((1, WIDE), np.float32)},))


@cache
def heavy() -> Case:
    """One MatMul with 64 MiB of weights."""
    weights = np.random.default_rng(0).standard_normal((4096, 4096), np.float32) / 64
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    proto = model(
        nodes, [("x", "float32", ("n", 4096))], [("y", "float32", ("n", 4096))], {"w": weights}
    )
    return Case(
        "heavy",
        proto,
        (Profile(dims={"n": [1, 2, 4]}),),
        tuple({"x": np.full((n, 4096), n, np.float32)} for n in (1, 4, 2)),
    )


@cache
def many_positions() -> Case:
    """Takes 48 MiB and finds up to 192 MiB."""
    case = positions()
    return Case(
        "many positions", case.proto, (Profile(dims={"n": [1, 4, 1 << 22]}),), ({"x": ramp(2, 3)},)
    )


EngineOf = Callable[[Callable[[], Case]], Engine]


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> EngineOf:
    @cache
    def built(make: Callable[[], Case]) -> Engine:
        case, folder = make(), tmp_path_factory.mktemp("engine")
        (folder / "out").mkdir()
        recipe, options = (
            Recipe(backend="tensorrt", precision=Precision.FP32),
            BuildOptions(profiles=case.profiles),
        )
        return backends.backend("tensorrt").build(
            case.write(folder / "source"),
            recipe,
            options,
            folder / "out",
            lambda fraction, text, figures=None: None,
        )

    return built


def load(engine: Engine) -> TrtLoaded:
    loaded = backends.load(engine)
    assert isinstance(loaded, TrtLoaded)
    return loaded


def check_runs(session: TrtSession, case: Case, *batches: Tensors) -> None:
    for feeds in batches:
        got = run_session(session, feeds)
        for name, expected in case.expected(feeds).items():
            np.testing.assert_allclose(got[name], expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def rt() -> Any:
    runtime = cuda.runtime()
    cuda.use_device(runtime, 0)
    return runtime


def free_bytes(rt: Any) -> int:
    return cuda.free_and_total_bytes(rt)[0]


@pytest.fixture
def fill(rt: Any) -> Iterator[Callable[[int], None]]:
    """Takes the GPU's memory but for about so many bytes, until `fill(-1)` or the end of the
    test.
    """
    held: list[cuda.DeviceBuffer] = []

    def take(leave: int) -> None:
        for buffer in held:
            buffer.close()
        held.clear()
        size = free_bytes(rt) - leave if leave >= 0 else 0
        while size > 2 * MIB:
            try:
                held.append(cuda.DeviceBuffer(rt, size))
            except cuda.OutOfDeviceMemory:
                size //= 2
            else:
                size = min(size, free_bytes(rt) - leave)

    yield take
    take(-1)


# -- graphs ------------------------------------------------------------------


def test_a_graph_answers_exactly_as_plain_runs_do(engine_of: EngineOf) -> None:
    case = convolution()
    with (
        closing(load(engine_of(convolution))) as loaded,
        closing(loaded.session()) as session,
        closing(loaded.session(graphs=False)) as plain,
    ):
        for scale in (1, 2, 3, 4):
            feeds = {"image": case.feeds[1]["image"] * np.float32(scale)}
            np.testing.assert_array_equal(
                run_session(session, feeds)["logits"], run_session(plain, feeds)["logits"]
            )
        assert (session.graphs, session.graph_refusal, plain.graphs) == (1, "", 0)
        check_runs(session, case, *case.feeds)


def test_shapes_are_replayed_after_eviction(engine_of: EngineOf) -> None:
    case = two_symbols()
    sizes = [(1 + number % 4, 1 + number) for number in range(GRAPHS + 3)]
    with closing(load(engine_of(two_symbols))) as loaded, closing(loaded.session()) as session:
        for _ in range(2):
            for size in sizes:
                feeds = {"x": ramp(*size), "mask": ramp(*size, dtype="int64") % 2}
                check_runs(
                    session,
                    case,
                    feeds,
                    feeds,
                    {**feeds, "x": feeds["x"] + 1},
                    {**feeds, "x": feeds["x"] - 1},
                )
        assert session.graphs == GRAPHS
        assert session.graph_refusal == ""


def test_replays_share_no_output(engine_of: EngineOf) -> None:
    batches: list[Tensors] = [
        {"x": ramp(4, 16) + np.float32(start), "mask": np.ones((4, 16), np.int64)}
        for start in range(6)
    ]
    with closing(load(engine_of(two_symbols))) as loaded, closing(loaded.session()) as session:
        outputs = [run_session(session, feeds)["y"] for feeds in batches]
    for feeds, output in zip(batches, outputs, strict=True):
        np.testing.assert_array_equal(output, feeds["x"])


def test_an_engine_that_cannot_be_captured_says_why_and_runs_plain(engine_of: EngineOf) -> None:
    case = positions()
    with closing(load(engine_of(positions))) as loaded, closing(loaded.session()) as session:
        check_runs(session, case, *case.feeds, *case.feeds, *case.feeds)
        assert session.graphs == 0
        assert "'where' depends on values" in session.graph_refusal


def test_a_branch_is_never_frozen_in_a_graph(engine_of: EngineOf) -> None:
    """Whether TensorRT lets itself be captured here or not."""
    case = branches()
    with closing(load(engine_of(branches))) as loaded, closing(loaded.session()) as session:
        check_runs(session, case, *case.feeds * 3)
        assert (session.graphs == 0) == bool(session.graph_refusal)


def test_both_profiles_are_captured(engine_of: EngineOf) -> None:
    case = two_profiles()
    with closing(load(engine_of(two_profiles))) as loaded:
        for preferred in (0, 1):
            with closing(loaded.session(preferred)) as session:
                check_runs(session, case, *case.feeds * 3)
                assert session.graphs == len(case.feeds)


def test_threads_run_sessions_of_their_own(engine_of: EngineOf) -> None:
    case = convolution()
    faults: list[BaseException] = []

    def work(session: TrtSession, order: int) -> None:
        try:
            check_runs(session, case, *case.feeds[::order] * 20)
        except BaseException as error:  # noqa: BLE001 - a thread cannot raise into its test
            faults.append(error)

    with closing(load(engine_of(convolution))) as loaded:
        sessions = [loaded.session() for _ in range(4)]
        threads = [
            threading.Thread(target=work, args=(session, 1 - 2 * (number % 2)))
            for number, session in enumerate(sessions)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert faults == []
        assert [session.graph_refusal for session in sessions] == [""] * 4


def test_the_timer_tells_device_time(engine_of: EngineOf) -> None:
    case = heavy()
    with closing(load(engine_of(heavy))) as loaded, closing(loaded.session()) as session:
        timer = session.timer()
        check_runs(session, case, *case.feeds)
        timer.start()
        for _ in range(100):
            session.execute()
        timer.stop()
        assert 0 < timer.elapsed_s() < 60


# -- memory ------------------------------------------------------------------


def test_two_sessions_hold_one_copy_of_the_weights(engine_of: EngineOf, rt: Any) -> None:
    case = heavy()
    with closing(load(engine_of(heavy))) as loaded, closing(loaded.session()) as one:
        check_runs(one, case, *case.feeds * 3)
        before = free_bytes(rt)
        with closing(loaded.session()) as other:
            check_runs(other, case, *case.feeds * 3)
            assert before - free_bytes(rt) < WEIGHTS_BYTES / 2


def test_fifty_opens_and_closes_return_the_memory(engine_of: EngineOf, rt: Any) -> None:
    case, left = heavy(), []
    for _ in range(53):
        loaded = load(engine_of(heavy))
        session = loaded.session()
        for _ in range(3):
            run_session(session, case.feeds[0])
        session.close()
        loaded.close()
        left.append(free_bytes(rt))
    assert max(left[2:]) - min(left[2:]) < 16 * MIB  # the first ones load kernels, which stay


def test_closing_the_engine_frees_what_its_sessions_hold(engine_of: EngineOf, rt: Any) -> None:
    load(engine_of(heavy)).close()
    before = free_bytes(rt)
    loaded = load(engine_of(heavy))
    session = loaded.session()
    run_session(session, heavy().feeds[0])
    assert before - free_bytes(rt) > WEIGHTS_BYTES * 0.9
    loaded.close()
    assert not session.is_open
    assert abs(before - free_bytes(rt)) < 16 * MIB


def test_out_of_memory_in_a_session_and_in_a_run_and_the_next_request_works(
    engine_of: EngineOf, fill: Callable[[int], None]
) -> None:
    case = many_positions()
    many = {"x": np.ones((1 << 22, 3), np.float32)}
    with closing(load(engine_of(many_positions))) as loaded, closing(loaded.session()) as session:
        check_runs(session, case, *case.feeds)
        fill(32 * MIB)
        with pytest.raises(HostError, match="the GPU is out of memory: requested") as error:
            loaded.session()
        assert error.value.code == "host.out_of_device_memory"
        with pytest.raises(cuda.OutOfDeviceMemory, match="the GPU is out of memory"):
            run_session(session, many)
        check_runs(session, case, *case.feeds)
        fill(-1)
        assert run_session(session, many)["where"].shape == (2, 3 << 22)
        with closing(loaded.session()) as another:
            check_runs(another, case, *case.feeds)


def test_out_of_memory_while_weights_are_loaded(
    engine_of: EngineOf, fill: Callable[[int], None]
) -> None:
    case = heavy()
    load(engine_of(heavy)).close()
    fill(24 * MIB)
    with pytest.raises(HostError) as error:
        load(engine_of(heavy))
    assert error.value.code == "host.out_of_device_memory"
    fill(-1)
    with closing(load(engine_of(heavy))) as loaded, closing(loaded.session()) as session:
        check_runs(session, case, *case.feeds)


# -- files -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["half", "random", "empty"])
def test_a_damaged_file(engine_of: EngineOf, tmp_path: Path, kind: str) -> None:
    engine = engine_of(convolution)
    data = engine.path.read_bytes()
    (tmp_path / engine.file).write_bytes(
        {"half": data[: len(data) // 2], "random": os.urandom(5000), "empty": b""}[kind]
    )
    with pytest.raises(StoreError, match=r"cannot be opened: TensorRT says: \w+ .*"):
        load(engine.model_copy(update={"root": tmp_path}))


def test_one_changed_byte_in_the_weights(engine_of: EngineOf, tmp_path: Path) -> None:
    engine = engine_of(heavy)
    data = bytearray(engine.path.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / engine.file).write_bytes(data)
    with pytest.raises(StoreError, match=r"its sha256 is not that of the engine that was built"):
        load(engine.model_copy(update={"root": tmp_path}))


def test_the_file_of_another_model(engine_of: EngineOf) -> None:
    engine, other = engine_of(convolution), engine_of(two_symbols)
    with pytest.raises(
        StoreError,
        match="the engine of another model: expected inputs and outputs image, logits, found",
    ):
        load(engine.model_copy(update={"root": other.root, "file": other.file}))


def test_a_process_that_runs_an_engine_loads_no_torch(engine_of: EngineOf, tmp_path: Path) -> None:
    case = convolution()
    (tmp_path / "case.pickle").write_bytes(pickle.dumps((engine_of(convolution), case.feeds[0])))
    program = """
import pickle, sys
from pathlib import Path
from pipeline import backends
from pipeline.backends.base import run_session
engine, feeds = pickle.loads(Path(sys.argv[1]).read_bytes())
session = backends.load(engine).session()
for _ in range(3):
    run_session(session, feeds)
print(session.graphs, sorted({"torch", "onnxruntime", "cuda.core"} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "case.pickle")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.splitlines()[-1:] == ["1 []"], result.stderr


# -- inputs on the GPU -------------------------------------------------------


class ByInterface:
    """A tensor by __cuda_array_interface__ alone."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            **tensor.__cuda_array_interface__,
            "version": 3,
            "stream": 1,
        }  # 1: the legacy default stream


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def session(engine_of: EngineOf) -> Iterator[TrtSession]:
    with closing(load(engine_of(two_symbols))) as loaded, closing(loaded.session()) as opened:
        yield opened


def test_inputs_may_lie_on_the_gpu(torch: Any, session: TrtSession) -> None:
    case = two_symbols()
    for feeds in (case.feeds[1], case.feeds[2], case.feeds[1]):
        on_gpu = {name: torch.from_numpy(array).cuda() for name, array in feeds.items()}
        for name in feeds:
            for value in (on_gpu[name], ByInterface(on_gpu[name])):
                check_runs(session, case, feeds)
                np.testing.assert_array_equal(
                    run_session(session, {**feeds, name: value})["y"], case.expected(feeds)["y"]
                )
        np.testing.assert_array_equal(run_session(session, on_gpu)["y"], case.expected(feeds)["y"])
    assert session.graphs == 2


def test_work_that_is_still_making_an_input_is_awaited(torch: Any, session: TrtSession) -> None:
    mask = np.ones((4, 16), np.int64)
    for value in (1.0, 2.0, 3.0):
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.zeros(4, 16, device="cuda")
            torch.cuda._sleep(200_000_000)  # about 0.1 s
            x += value
            got = run_session(session, {"x": x, "mask": mask})["y"]
        np.testing.assert_array_equal(got, np.full((4, 16), value))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: x.double(), "'x' has dtype float64, expected float32"),
        (lambda x: x[:, :4].reshape(-1), "'x' has rank 1"),
        (lambda x: x.repeat(1, 4), "'sequence' = "),
        (lambda x: x.t().contiguous().t(), "has strides"),
        (lambda x: x.cpu(), "'x' is a Tensor, expected a numpy array"),
        (lambda x: x.to("meta"), "'x' is a Tensor"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    torch: Any, session: TrtSession, make: Callable[[Any], Any], message: str
) -> None:
    case = two_symbols()
    feeds = case.feeds[2]
    with pytest.raises(DataError) as error:
        session.bind({**feeds, "x": make(torch.from_numpy(feeds["x"]).cuda())})
    assert message in error.value.message
    check_runs(session, case, feeds)  # and goes on


# -- outputs on the GPU, and large inputs ------------------------------------


def test_outputs_stay_on_the_gpu_until_the_next_run(torch: Any, session: TrtSession) -> None:
    case = two_symbols()
    for feeds in (*case.feeds, *case.feeds):
        session.bind(feeds)
        session.upload()
        session.execute()
        output = session.device_outputs()["y"]
        for tensor in (torch.from_dlpack(output), torch.as_tensor(output, device="cuda")):
            assert (tensor.is_cuda, tensor.data_ptr()) == (True, output.pointer)
            np.testing.assert_array_equal(tensor.cpu().numpy(), case.expected(feeds)["y"])


def test_large_inputs_arrive_from_every_kind_of_memory(torch: Any, engine_of: EngineOf) -> None:
    engine = engine_of(wide)
    shared = mmap.mmap(-1, 4 * WIDE_ROWS * WIDE)
    with closing(load(engine)) as loaded, closing(loaded.session()) as session:
        for seed in range(3):
            values = np.random.default_rng(seed).standard_normal((WIDE_ROWS, WIDE), np.float32)
            own = backends.input_buffer(engine, "x", values.shape)
            locked = np.frombuffer(shared, np.uint8)
            unlock = backends.page_lock(engine, locked)
            of_torch = torch.empty(values.shape, pin_memory=True).numpy()
            in_shared = locked.view(np.float32).reshape(values.shape)
            for array in (own, of_torch, in_shared):
                array[...] = values
                assert cuda.is_page_locked(cuda.runtime(), array)
            assert not cuda.is_page_locked(cuda.runtime(), values)
            for array in (values, own, of_torch, in_shared, values[: WIDE_ROWS // 2]):
                got = run_session(session, {"x": array})["y"]
                np.testing.assert_array_equal(got, array * 2)
            unlock()
            assert not cuda.is_page_locked(cuda.runtime(), in_shared)
            np.testing.assert_array_equal(run_session(session, {"x": in_shared})["y"], values * 2)
        assert session.graphs == 2
