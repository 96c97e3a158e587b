"""Packed sequences are compared with each alone, and a leak between them is found."""

from pathlib import Path

import pytest

from pipeline.benchmark.batch_invariance import TOLERANCE
from pipeline.benchmark.packing import SAMPLES, prove_packing
from pipeline.compiler.context import open_context
from pipeline.core.processing import Postprocess
from pipeline.core.recipe import Precision
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.results.report import PackingProof
from tests.pipeline.benchmark.encoder import (
    HIDDEN,
    MEAN,
    NO_MASK,
    SCORES,
    encoder_engine,
    encoder_plan,
)

ALMOST_EQUAL = "1 + 0 * hidden + 1e-6 * hidden.mean(1, keepdim=True)"


def proof_of(
    folder: Path, scores: str, hidden: str, steps: Postprocess | None = None
) -> PackingProof:
    plan = encoder_plan(folder, scores, hidden)
    if steps:
        plan = plan.model_copy(update={"postprocess": {"last_hidden_state": steps}})
    samples = open_context(plan, Runner(Store(folder / "store"))).data.selection.first(SAMPLES)
    assert plan.serving.packing is not None
    return prove_packing(encoder_engine(plan, folder), plan.serving.packing, samples)


def test_a_model_that_keeps_to_its_mask_is_proved(tmp_path: Path) -> None:
    proof = proof_of(tmp_path, SCORES, HIDDEN)
    assert (proof.reason, proof.sequences, proof.rows) == ("", SAMPLES, 3)
    assert proof.largest_error is not None
    assert 0 < proof.largest_error < TOLERANCE[Precision.FP32]


@pytest.mark.parametrize(
    ("scores", "hidden"), [(NO_MASK, HIDDEN), (SCORES, MEAN)], ids=["no mask", "mean over tokens"]
)
def test_a_leak_between_sequences_is_found(tmp_path: Path, scores: str, hidden: str) -> None:
    proof = proof_of(tmp_path, scores, hidden)
    assert "sequences in one row influence each other" in proof.reason
    assert "of 64 tokens, from token 0 of a row of 128" in proof.reason


def test_indices_are_proved_by_the_values_beside_them(tmp_path: Path) -> None:
    """Other sequences change the values by less than the tolerance, and so the order of them."""
    both = proof_of(tmp_path / "both", SCORES, ALMOST_EQUAL, Postprocess(top_k=2))
    assert both.reason == ""
    alone = proof_of(tmp_path / "alone", SCORES, ALMOST_EQUAL, Postprocess(argmax=True))
    assert "output 'last_hidden_state_indices'" in alone.reason
