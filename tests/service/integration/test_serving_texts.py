"""The sentence encoder of configs/minilm.yaml behind a real server: texts of unequal length run
together, and are answered as if alone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import pytest

from pipeline import backends
from pipeline.benchmark.batch_invariance import TOLERANCE
from pipeline.compiler.graph import export_plan
from pipeline.core.artifacts import BuildOptions, Engine
from pipeline.core.progress import silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Tensors
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.plan.files import load_plan
from pipeline.plan.schema import Plan
from service.client import Client, Inference
from service.client.client import KINDS
from service.jobs.store import JobStore
from service.registry.models import DeploymentOptions
from service.storage.database import Database
from service.storage.layout import Folders
from tests.service.integration.test_server import serving
from tests.service.serving.engines import Array, direct
from tests.service.serving.models import ended_job

ROOT = Path(__file__).parents[3]
NAME, OUTPUT = "minilm", "sentence_embedding"
TEXTS, CALLS = 12, 96


def encoder(plan: Plan, folder: Path) -> Engine:
    """Its fp32 engine, without a compile's measuring."""
    model = export_plan(plan, Runner(Store(folder / "store")), simplified=False)
    recipe = Recipe(backend="onnxruntime", precision=Precision.FP32, realised_in="graph")
    (out := folder / "engine").mkdir()
    return backends.backend("onnxruntime").build(
        model, recipe, BuildOptions(profiles=plan.profiles, threads=1), out, silent
    )


def texts() -> list[Tensors]:
    """Sentences as token ids [1, own length], and their masks."""
    feeds: list[Tensors] = []
    for length in (16, 32, 48):
        with np.load(ROOT / "calibration_data" / "sentences" / f"validation_{length}.npz") as rows:
            for ids, mask in zip(
                rows["input_ids"][: TEXTS // 3], rows["attention_mask"], strict=False
            ):
                feeds.append(
                    {
                        "input_ids": ids[None, : mask.sum()],
                        "attention_mask": mask[None, : mask.sum()],
                    }
                )
    return feeds


def ask_all(url: str, requests: Sequence[Tensors], clients: int) -> list[Inference]:
    def ask(feeds: Tensors) -> Inference:
        body = io.BytesIO()
        np.savez(body, **feeds)  # type: ignore[arg-type]
        with Client(url) as client:
            return client.infer(body.getvalue(), KINDS[".npz"], NAME)

    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(ask, requests))


def apart(left: Array, right: Array) -> float:
    """As batches are proved: of the largest value."""
    return float(np.abs(left - right).max() / np.abs(right).max())


@pytest.mark.slow
def test_texts_of_unequal_length_are_answered_together_as_alone(tmp_path: Path) -> None:
    plan = load_plan(ROOT / "configs" / "minilm.yaml")
    engine, requests, tolerance = encoder(plan, tmp_path), texts(), TOLERANCE[Precision.FP32]
    assert len({request["input_ids"].shape for request in requests}) > 4
    expected = [direct(engine, request)[OUTPUT] for request in requests]
    assert (
        min(apart(one, other) for index, one in enumerate(expected) for other in expected[:index])
        > 10 * tolerance
    )  # known by their answers
    with closing(Database(tmp_path / "crucible.db")) as database:
        report = ended_job(
            Folders(tmp_path), JobStore(database), serving=plan.serving, engine=engine
        )
    with serving(tmp_path) as server, Client(server.url) as client:
        promoted = client.promote(NAME, report)
        assert promoted.current is not None
        batch = promoted.current.batch
        assert (batch.proved, batch.reason, batch.padding) == (True, "", plan.serving.padding)
        client.load(NAME, DeploymentOptions(max_delay_s=0.05))
        alone = ask_all(server.url, requests, clients=1)
        assert {each.batch_size for each in alone} == {1}
        together = ask_all(server.url, requests * (CALLS // TEXTS), clients=TEXTS)
        padding = re.findall(
            r"^crucible_inference_padding_ratio\{.*\} (\S+)$",
            httpx.get(f"{server.url}/metrics").text,
            re.MULTILINE,
        )
    assert max(each.batch_size for each in together) > 1
    assert float(padding[0]) > 0, "no texts of unequal length ran together"
    for number, answer in enumerate([*alone, *together]):
        assert apart(answer.outputs[OUTPUT], expected[number % TEXTS]) <= tolerance
