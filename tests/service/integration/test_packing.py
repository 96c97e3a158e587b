"""Requests of unequal length in shared rows: each gets the answer that it gets alone."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import pytest

from pipeline.benchmark.batch_invariance import TOLERANCE, prove_batch
from pipeline.core.artifacts import Engine
from pipeline.core.recipe import Precision
from pipeline.core.shapes import Tensors
from pipeline.results.report import PackingProof
from pipeline.serving_inputs import BatchSpec, Packing, ServingConfig, with_made_inputs
from service.client import Client
from service.client.client import KINDS
from service.errors import Unprocessable
from service.inference import InferAnswer
from service.jobs.store import JobStore
from service.registry.models import DeploymentOptions
from service.registry.promotion import with_packing
from service.serving.batching import (
    Kind,
    Place,
    Queue,
    Rows,
    Rules,
    Sizes,
    WaitingRequest,
    offer,
    take,
)
from service.serving.request_shapes import ShapeMatcher
from service.storage.database import Database
from service.storage.layout import Folders
from tests.pipeline.benchmark.encoder import LONGEST, PACKING, WORDS, encoder_engine, encoder_plan
from tests.service.integration.test_server import serving
from tests.service.serving.engines import Bench, asking, deployed, direct, play
from tests.service.serving.models import ended_job

DECLARED = Packing.model_validate(PACKING)
OUTPUT = "last_hidden_state"
LEAK = PackingProof(reason="sequences in one row influence each other")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("encoder")
    return encoder_engine(encoder_plan(folder), folder)


@pytest.fixture(scope="module")
def proved(engine: Engine) -> BatchSpec:
    """Its proved batch, without packing."""
    batch = prove_batch(engine, ())
    assert batch.proved, batch.reason
    return batch


def sequences(count: int, rows: int = 1) -> list[Tensors]:
    random = np.random.default_rng(0)
    lengths = random.integers(16, LONGEST, count, endpoint=True)
    return [{"input_ids": random.integers(0, WORDS, (rows, length))} for length in lengths]


async def ask_at_once(bench: Bench, requests: Sequence[Tensors]) -> list[InferAnswer]:
    return await asyncio.gather(*(bench.deployment.infer(asking(each)) for each in requests))


def check_answers(
    engine: Engine, requests: Sequence[Tensors], answers: Sequence[InferAnswer]
) -> None:
    for request, answer in zip(requests, answers, strict=True):
        alone = direct(engine, with_made_inputs(request, engine.inputs, DECLARED))[OUTPUT]
        assert answer.outputs[OUTPUT].shape == alone.shape
        error = np.abs(answer.outputs[OUTPUT] - alone).max() / np.abs(alone).max()
        assert error <= TOLERANCE[Precision.FP32]


def padding_of(bench: Bench) -> float:
    labels = {"model": bench.deployment.model, "version": "1"}
    return bench.registry.get_sample_value("crucible_inference_padding_ratio", labels) or 0.0


def test_sequences_share_rows_and_are_answered_as_alone(
    tmp_path: Path, engine: Engine, proved: BatchSpec
) -> None:
    requests = sequences(32)
    tokens = sum(each["input_ids"].size for each in requests)

    async def story() -> None:
        async with deployed(tmp_path, engine, with_packing(proved, DECLARED, PackingProof())) as it:
            check_answers(engine, requests, await ask_at_once(it, requests))
            statistics = it.deployment.statistics()
            assert -(-tokens // LONGEST) <= statistics.rows < len(requests)
            assert statistics.executions == -(-statistics.rows // proved.maximum)
            # padded to the longest, each request takes a row of its own
            assert 0 < padding_of(it) < (1 - tokens / (len(requests) * LONGEST)) / 2

    play(story)


def test_a_single_request_runs_in_its_own_length(
    tmp_path: Path, engine: Engine, proved: BatchSpec
) -> None:
    requests = sequences(2)

    async def story() -> None:
        packing = with_packing(proved, DECLARED, PackingProof())
        async with deployed(tmp_path, engine, packing) as it:
            for request in requests:
                check_answers(engine, [request], await ask_at_once(it, [request]))
            assert padding_of(it) == 0

    play(story)


def test_a_request_of_several_rows_shares_what_they_leave(
    tmp_path: Path, engine: Engine, proved: BatchSpec
) -> None:
    long, short = {"input_ids": np.full((2, 100), 3)}, {"input_ids": np.full((1, 28), 4)}
    longest = {"input_ids": np.full((1, LONGEST), 5)}

    async def story() -> None:
        async with deployed(tmp_path, engine, with_packing(proved, DECLARED, PackingProof())) as it:
            requests = [long, longest, short]
            answers = await ask_at_once(it, requests)
            check_answers(engine, requests, answers)
            assert {answer.timing.batch_size for answer in answers} == {3}

    play(story)


def test_without_the_proof_each_row_holds_one_sequence(
    tmp_path: Path, engine: Engine, proved: BatchSpec
) -> None:
    requests = [{"input_ids": np.full((1, 16), word)} for word in range(4)]
    off = with_packing(proved, DECLARED, LEAK)
    assert off.reason == "packing is off: sequences in one row influence each other"
    assert with_packing(proved, DECLARED, None).reason.endswith("the report has no proof of it")
    assert with_packing(proved, None, None) is proved

    async def story() -> None:
        async with deployed(tmp_path, engine, off) as it:
            answers = await ask_at_once(it, requests)
            check_answers(engine, requests, answers)
            assert {answer.timing.batch_size for answer in answers} == {len(requests)}
        alone = off.model_copy(update={"proved": False})
        async with deployed(tmp_path, engine, alone) as it:
            answers = await ask_at_once(it, requests)
            check_answers(engine, requests, answers)
            assert {answer.timing.batch_size for answer in answers} == {1}

    play(story)


def test_clients_see_what_they_send(tmp_path: Path, engine: Engine) -> None:
    declared = ServingConfig(packing=DECLARED)
    with closing(Database(tmp_path / "crucible.db")) as database:
        report = ended_job(Folders(tmp_path), JobStore(database), serving=declared, engine=engine)
    with serving(tmp_path) as server, Client(server.url) as client:
        version = client.promote("encoder", report).current
        assert [each.name for each in version.inputs] == ["input_ids"]
        assert (version.batch.packing, version.batch.packs) == (DECLARED, False)
        client.load("encoder", DeploymentOptions())
        metadata = httpx.get(f"{server.url}/v2/models/encoder").json()
        assert [each["name"] for each in metadata["inputs"]] == ["input_ids"]
        (request,) = sequences(1)
        np.save(body := io.BytesIO(), request["input_ids"])
        answer = client.infer(body.getvalue(), KINDS[".npy"], "encoder")
        assert answer.outputs[OUTPUT].shape[:2] == request["input_ids"].shape


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": np.ones((1, LONGEST + 1), np.int64)}, f"holds .*tokens = {LONGEST + 1}"),
        ({"input_ids": np.ones((1, 0), np.int64)}, "tokens = 0"),
        ({"input_ids": np.ones((1, 8), np.int32)}, "has dtype int32, expected int64"),
        (
            {name: np.ones((1, 8), np.int64) for name in ("input_ids", "attention_mask")},
            "the server makes 'attention_mask', 'position_ids' itself",
        ),
    ],
)
def test_what_is_no_sequence_is_refused(
    engine: Engine, proved: BatchSpec, packs: bool, inputs: Tensors, message: str
) -> None:
    proof = PackingProof() if packs else LEAK
    with pytest.raises(Unprocessable, match=message):
        ShapeMatcher(engine, with_packing(proved, DECLARED, proof)).match(inputs)


def test_a_request_goes_to_the_first_row_with_room(engine: Engine, proved: BatchSpec) -> None:
    matcher = ShapeMatcher(engine, with_packing(proved, DECLARED, PackingProof()))
    kinds = {matcher.match(each).kind for each in sequences(8)}
    assert len(kinds) == 1
    (kind,) = kinds
    rows = Rows(kind.room, most=2)
    lengths = (100, 60, 28, 69, 68, 1)
    places = [rows.place(WaitingRequest(0, 1, 0.0, kind, length)) for length in lengths]
    assert [place and (place.row, place.start) for place in places] == [
        (0, 0),
        (1, 0),
        (0, 100),
        None,
        (1, 60),
        None,
    ]
    assert rows.is_full


def test_a_short_request_passes_one_that_does_not_fit_and_none_waits_for_an_idle_worker() -> None:
    kind = Kind((Sizes(0, 1, 8),), room=10)
    queue = Queue(Rules(1, max_delay_s=1.0))
    for number, length in enumerate((6, 5, 4)):
        queue = offer(queue, WaitingRequest(number, 1, 0.0, kind, length))
    queue, batch = take(queue, now=0.0, idle=False)  # row 0 is full
    assert batch is not None
    assert [request.number for request in batch.requests] == [0, 2]
    assert (batch.rows, batch.places) == (1, (Place(0), Place(0, 6)))
    assert take(queue, now=0.0, idle=False) == (queue, None)
    queue, batch = take(queue, now=0.0, idle=True)
    assert batch is not None
    assert ([request.number for request in batch.requests], queue.waiting) == ([1], ())
