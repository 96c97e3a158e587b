"""The GPU table's ways to run an engine, on the doubles of CUDA and TensorRT or on the CPU; its
host.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from pipeline.backends.base import run_session
from pipeline.backends.onnxruntime import backend as onnxruntime_
from pipeline.benchmark.interleaved import Block, NextShape, Take, Workload
from pipeline.core.artifacts import BuildOptions, Target
from pipeline.core.recipe import Precision, Recipe
from pipeline.execution.child_process import Channel
from pipeline.measurement.clock import WarmUpOptions, samples_from_blocks
from pipeline.measurement.comparison import MIN_PAIRS
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.schema import BenchmarkConfig
from pipeline.results.benchmarks import BenchmarkFailure
from tests.pipeline.backends.tensorrt.builders import Bench, doubled, feeds

ROOT = Path(__file__).parents[2]
H200 = Target(
    backend="tensorrt",
    version="10.6.0",
    device="NVIDIA H200",
    compute_capability="9.0",
    driver="580",
)


# -- sessions on doubles -----------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_bare_loop_gives_the_engines_answers_and_gives_all_memory_back(
    gpu: dict[str, ModuleType], bench: Bench
) -> None:
    engine = bench.engine()
    session = gpu["bare"].BareSession(bench.trt, bench.cuda, engine, feeds(4))
    for start in (0, 7):
        np.testing.assert_array_equal(
            run_session(session, feeds(4, start))["y"], doubled(dict(feeds(4, start)))["y"]
        )
    assert bench.cuda.launches == 2
    session.close()
    assert not bench.cuda.pinned
    assert not bench.cuda.graphs
    assert not bench.cuda.streams


def test_blocks_of_a_session_and_of_a_flow(gpu: dict[str, ModuleType], bench: Bench) -> None:
    contest = gpu["contest"]
    loaded = bench.load(bench.engine())
    single = contest.Single(loaded.session(), feeds(4))
    np.testing.assert_array_equal(single.run()["y"], doubled(dict(feeds(4)))["y"])
    block = single.take(0.01)
    assert block.runs == len(block.end_to_end_s) > 0
    assert len(block.compute_s) > 0
    assert min(block.compute_s) > 0
    flow = contest.Flow([loaded.session(), loaded.session()], feeds(4), upload=True)
    np.testing.assert_array_equal(flow.run()["y"], doubled(dict(feeds(4)))["y"])
    least, most = contest.DEPTHS
    assert least <= flow.depth <= most
    flow.depth, launched = 3, bench.cuda.launches
    flow.run()
    assert bench.cuda.launches - launched == 6
    taken = flow.take(0.01)
    assert taken.end_to_end_s == taken.compute_s
    samples_from_blocks([taken.upload_s, taken.upload_s], ())  # has a ratio
    loaded.close()


class Talk(Channel):
    """The parent's words in order; the messages of the child are kept."""

    def __init__(self, words: list[object]) -> None:
        self.words, self.messages = words, list[Any]()

    def send(self, payload: object) -> None:
        self.messages.append(payload)

    def receive(self) -> object:
        return self.words.pop(0)


def test_a_child_gives_a_block_for_each_turn(gpu: dict[str, ModuleType], bench: Bench) -> None:
    loaded = bench.load(bench.engine())
    channel = Talk(
        [WarmUpOptions(min_runs=3, min_s=0.0, max_s=0.0), Take(0.01), Take(0.01), NextShape()]
    )
    gpu["contest"].take_turns(channel, gpu["contest"].Single(loaded.session(), feeds(4)))
    warmup, *blocks = channel.messages
    assert len(warmup) >= 3
    assert [isinstance(block, Block) for block in blocks] == [True, True]
    assert not channel.words
    loaded.close()


def test_what_a_child_says_first_is_kept_and_handed_on(gpu: dict[str, ModuleType]) -> None:
    contest = gpu["contest"]
    messages: list[object] = []

    class Peer:
        def receive(self, timeout_s: float | None = None) -> object:
            return words.pop(0)

    first = contest.Loaded(1.0, {}, {})
    words = [first, (0.1,)]
    listening = contest.Listening(Peer(), messages.append)
    assert listening.receive() is first
    assert listening.receive() == (0.1,)
    assert messages == [first]


def test_a_race_of_real_engines_in_children_goes_on_without_one_that_cannot_load(
    gpu: dict[str, ModuleType], tmp_path: Path
) -> None:
    """On the CPU: the same children, messages and figures as on a GPU."""
    contest = gpu["contest"]
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "relu",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10),
        tmp_path / "relu.onnx",
    )
    model = onnx_model(tmp_path, "relu.onnx")
    (tmp_path / "out").mkdir()
    recipe = Recipe(backend="onnxruntime", precision=Precision.FP32)
    engine = onnxruntime_.build(
        model, recipe, BuildOptions(profiles=(), threads=1), tmp_path / "out", lambda *_: None
    )
    entrants = [
        contest.Entrant("ours fp32", engine),
        contest.Entrant("loop fp32", engine, "bare"),  # there is no GPU
        contest.Entrant("two at once", engine, "flow", 2, True),
    ]
    fed = {"x": np.full((2, 4), -1, np.float32)}
    watch = gpu["host"].Watch()
    ours, loop, flow = contest.contest(
        entrants,
        Workload({}, fed, 2, None, None),
        BenchmarkConfig(duration_s=0.05, warmup_s=0.01),
        watch,
    )
    assert isinstance(loop.result, BenchmarkFailure)
    assert loop.loaded is None
    assert "failed" in gpu["facts"].entry_of(loop)
    np.testing.assert_array_equal(ours.loaded.outputs["y"], np.zeros((2, 4)))
    assert ours.loaded.seconds > 0
    figures = gpu["facts"].entry_of(ours)
    assert figures["processes"] >= MIN_PAIRS
    # Not compared: blocks of both are measured apart, so on a busy host either may be larger.
    assert min(figures["device_median_ms"], figures["wall_median_ms"]) > 0
    assert "upload_median_ms" not in gpu["facts"].entry_of(flow)
    assert gpu["facts"].ratios([ours, loop, flow], ["fp32"]) == []
    assert watch.turns > 9


def test_cosines_of_wrong_and_missing_answers(gpu: dict[str, ModuleType]) -> None:
    cosine = gpu["contest"].cosine
    good = {"y": np.array([1.0, 2.0])}
    assert cosine({"y": np.array([2.0, 4.0])}, good) == pytest.approx(1)
    assert cosine({"y": np.array([-1.0, -2.0])}, good) == pytest.approx(-1)
    for wrong in ({}, {"y": np.array([np.nan, 1])}, {"y": np.zeros(2)}, {"y": np.ones(3)}):
        assert cosine(wrong, good) is None


# -- the host ----------------------------------------------------------------


def test_states_of_the_gpu(gpu: dict[str, ModuleType]) -> None:
    host = gpu["host"]
    state = host.state_from_line("1980, 3201, 512.33, 54, 97")
    assert state == {
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "power_w": 512.33,
        "temperature_c": 54,
        "busy_percent": 97,
    }
    assert host.state_from_line("1980, 3201, [N/A], 54, 97") == {
        name: value for name, value in state.items() if name != "power_w"
    }
    assert host.state_from_line("no devices were found") == {}
    assert host.gpu_state("no-such-command") == {}
    assert host.summary_of([{"power_w": 100.0}, {"power_w": 500.0}, {}])["power_w"] == {
        "min": 100.0,
        "median": 300.0,
        "max": 500.0,
    }


def test_caches_go_from_one_home_to_another(gpu: dict[str, ModuleType], tmp_path: Path) -> None:
    host = gpu["host"]
    (tmp_path / "home" / "timing" / "key").mkdir(parents=True)
    (tmp_path / "home" / "timing" / "key" / "cache.bin").write_bytes(b"times")
    caches = host.store(tmp_path / "home", tmp_path / "kept")
    assert set(caches) == {"timing"}
    (tmp_path / "other").mkdir()
    assert host.restore(tmp_path / "other", tmp_path / "kept") == ["timing"]
    assert (tmp_path / "other" / "timing" / "key" / "cache.bin").read_bytes() == b"times"
    assert host.restore(tmp_path / "other", tmp_path / "kept") == []
    assert "too large" in host.store(tmp_path / "home", tmp_path / "none", most_bytes=1)["timing"]
    assert not (tmp_path / "none" / "timing.tar.gz").exists()


# -- PyTorch, as far as it goes without a GPU --------------------------------


def test_models_of_the_table_have_biases_that_no_simplifier_takes_away(
    gpu: dict[str, ModuleType],
) -> None:
    for module in (gpu["nets"].encoder(), gpu["nets"].vit_b_16()):
        biases = {
            name: parameter
            for name, parameter in module.named_parameters()
            if name.endswith("bias")
        }
        assert len(biases) > 60
        assert all(bool(parameter.any()) for parameter in biases.values())


def test_the_encoder_without_a_mask_makes_none_when_it_is_traced(
    gpu: dict[str, ModuleType],
) -> None:
    encoder, ids = gpu["nets"].encoder(), torch.randint(0, 30522, (1, 8))
    encoder.bert.encoder.layer = encoder.bert.encoder.layer[:1]
    with torch.inference_mode():
        torch.testing.assert_close(encoder(ids), encoder(ids, torch.ones(1, 8, dtype=torch.int64)))
    nodes = torch.export.export(encoder, (ids,)).graph.nodes
    (attention,) = [node for node in nodes if "scaled_dot_product_attention" in str(node.target)]
    assert len(attention.args) == 3
    assert "attn_mask" not in attention.kwargs


def test_peers_in_fp16_take_and_return_fp32(gpu: dict[str, ModuleType]) -> None:
    import torch

    peers = gpu["torch_peers"]
    torch.manual_seed(0)
    inner = torch.nn.Linear(4, 2).eval()
    x = torch.randn(3, 4)
    with torch.inference_mode():
        expected = inner(x)
        module = peers.cast_module(inner, Precision.FP16)
        output = module(x)
    assert output.dtype is torch.float32
    assert inner.weight.dtype is torch.float16
    torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2)
    assert peers.cast_module(inner, Precision.FP32) is inner


def test_forced_flash_attention_gets_no_mask(gpu: dict[str, ModuleType]) -> None:
    attention = torch.nn.functional.scaled_dot_product_attention
    query, key, value = torch.randn(3, 1, 2, 4, 8)
    mask = torch.tensor([True, True, False, False]).expand(1, 1, 4, 4)
    with gpu["torch_peers"].unmasked_attention():
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=0.0, is_causal=False
        )
    torch.testing.assert_close(output, attention(query, key, value))
    assert torch.nn.functional.scaled_dot_product_attention is attention


def test_a_peers_engine_names_its_source(gpu: dict[str, ModuleType], tmp_path: Path) -> None:
    from pipeline.core.artifacts import ModelSource, OnnxModel

    source = ModelSource(
        entrypoint="nets:resnet18", python_path=ROOT / "benchmarks" / "gpu", digest="d"
    )
    model = OnnxModel(root=tmp_path, file="m.onnx", digest="m", opset=20, inputs=(), outputs=())
    engine = gpu["torch_peers"].peer_engine(source, model, "compile fp16", H200, tmp_path)
    assert engine.recipe.label == "pytorch compile fp16"
    assert ModelSource.model_validate_json(engine.path.read_text()) == source


def test_values_do_not_vanish_in_a_model_of_random_weights(gpu: dict[str, ModuleType]) -> None:
    """Else fp16 cannot hold them, and nodes stay in fp32."""
    torch.manual_seed(0)
    net = gpu["nets"].mobilenet_v2().eval()
    with torch.inference_mode():
        values = net.features(torch.randn(2, 3, 128, 128))
    assert 0.1 < float(values.std()) < 10
