"""Which bytes a token reads, and the floor that follows from them."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pipeline.llm.engine import LanguageEngine
from pipeline.llm.plan import LanguageBenchmark
from pipeline.llm.speed.roofline import operator_shares, roofline, weight_bytes_read

ov = pytest.importorskip("openvino", reason="language models: no openvino")


def test_the_floor_is_what_is_read_over_the_rate_of_memory() -> None:
    options = LanguageBenchmark(prompt_tokens=100, output_tokens=20, concurrency=(2,))
    found = roofline(8_000_000, 1000.0, options, (1e9, 2e9), 0.02)
    assert found.cache_bytes == 2 * 110 * 1000
    assert found.floor_s == pytest.approx(8.22e-3)
    assert found.share == pytest.approx(8.22e-3 / 0.02)
    assert found.resident_share == pytest.approx(found.share / 2)


def test_operators_are_products_attention_or_other() -> None:
    times = {"FullyConnectedCompressed": 6.0, "MatMul": 1.0, "ScaledDotProductAttention": 2.0}
    shares = operator_shares(Counter({**times, "RMS": 1.0}))
    assert shares == {"products": 0.7, "attention": 0.2, "other": 0.1}
    assert set(operator_shares(Counter()).values()) == {0.0}


def test_tables_of_which_a_row_is_read_do_not_count(tmp_path: Path) -> None:
    """Weights in 4 bits with scales, and an embedding that no product reads."""
    ops = ov.opset13
    ids = ops.parameter([1], np.int64, name="ids")
    table = ops.constant(np.ones((100, 16), np.float16))
    rows = ops.gather(ops.convert(table, "f32"), ids, ops.constant(0))
    stored = ops.constant(np.ones((16, 32), np.uint8)).get_data()
    weights = ops.convert(ops.constant(ov.Tensor(stored, [16, 32], ov.Type.u4)), "f16")
    scales = ops.constant(np.ones((16, 1), np.float16))
    product = ops.matmul(rows, ops.convert(ops.multiply(weights, scales), "f32"), False, False)
    ov.save_model(ov.Model([product], [ids]), tmp_path / "graph.xml", compress_to_fp16=False)
    engine = LanguageEngine.model_construct(root=tmp_path, file="graph.xml")
    assert weight_bytes_read(engine) == 16 * 32 // 2 + 2 * 16
