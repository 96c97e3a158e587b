"""Texts in slots beside the same ones alone, on small random models in fp32."""

import numpy as np
import pytest
import torch

from pipeline.errors import UnsupportedError
from pipeline.llm.reference import Ids
from pipeline.llm.torch_engine.decoder import Decoder
from pipeline.llm.torch_engine.network import Network
from pipeline.llm.torch_engine.slots import Slots, batch_sizes, lengths
from pipeline.llm.torch_engine.weights import network_of
from tests.pipeline.llm.models import write_model
from tests.pipeline.llm.torch_engine.test_decoder import module_of

TOLERANCE = 1e-4
"""Of log-probabilities, in nats: products of other shapes are rounded otherwise."""

SHORT, LONG = np.arange(5, 25), np.arange(40, 110)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    return network_of(module_of(write_model(tmp_path_factory.mktemp("model"), "qwen3")))


def alone(network: Network, prompt: Ids, tokens: int) -> tuple[list[int], list[float]]:
    (answer,) = Decoder(network, 256, "eager").generate_together([prompt], tokens)
    return answer.tokens.tolist(), answer.log_probs.tolist()


def read_all(slots: Slots, row: int, prompt: Ids) -> int:
    """Read a whole prompt. Return in how many parts."""
    end = parts = 0
    while end < prompt.size:
        end, parts = slots.read(row, prompt, end), parts + 1
    return parts


class Log:
    """What each row got."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.tokens: list[list[int]] = [[] for _ in range(slots.rows)]
        self.log_probs: list[list[float]] = [[] for _ in range(slots.rows)]

    def note(self, *rows: int) -> None:
        for row in rows:
            self.tokens[row].append(int(self._slots.buffers.tokens[row]))
            self.log_probs[row].append(float(self._slots.buffers.log_probs[row]))


@pytest.mark.parametrize("pads", [False, True], ids=["exact", "padded, as on a GPU"])
@pytest.mark.parametrize(("chunk", "parts"), [(256, 1), (32, 3), (24, 3)])
def test_a_text_joins_another_one_and_both_are_as_alone(
    network: Network, pads: bool, chunk: int, parts: int
) -> None:
    slots = Slots(network, 4, 256, chunk=chunk, pads=pads)
    log = Log(slots)
    assert read_all(slots, 0, SHORT) == 1
    log.note(0)
    for _ in range(5):
        slots.step(1)
        log.note(0)
    end = 0
    for number in range(parts):  # the other one goes on in between
        end = slots.read(2, LONG, end)
        assert (end == LONG.size) == (number == parts - 1)
        if end < LONG.size:
            slots.step(3)
            log.note(0)
    log.note(2)
    for _ in range(5):
        slots.step(3)
        log.note(0, 2)
    for row, prompt in ((0, SHORT), (2, LONG)):
        tokens, log_probs = alone(network, prompt, len(log.tokens[row]))
        assert log.tokens[row] == tokens
        assert log.log_probs[row] == pytest.approx(log_probs, abs=TOLERANCE)


def test_a_text_moves_and_its_row_serves_another_one(network: Network) -> None:
    slots = Slots(network, 2, 256)
    log = Log(slots)
    read_all(slots, 1, LONG)
    log.note(1)
    slots.step(2)
    log.note(1)
    slots.move(1, 0, LONG.size + 1)
    slots.step(1)
    log.note(0)
    read_all(slots, 1, SHORT)
    log.tokens[1], log.log_probs[1], moved = [], [], log.tokens[1]
    log.note(1)
    slots.step(2)
    log.note(0, 1)
    assert moved + log.tokens[0] == alone(network, LONG, 4)[0]
    assert log.tokens[1] == alone(network, SHORT, 2)[0]


def test_rows_without_a_text_stay_inside_the_cache(network: Network) -> None:
    slots = Slots(network, 2, 64)
    read_all(slots, 1, SHORT)
    for _ in range(64 + 3):
        slots.step(2)
    assert slots.buffers.positions.tolist() == [63, 63]
    read_all(slots, 0, SHORT)
    log = Log(slots)
    log.note(0)
    slots.step(1)
    log.note(0)
    assert log.tokens[0] == alone(network, SHORT, 2)[0], "what was left there must not be seen"


@pytest.mark.parametrize("chunk", [256, 32])
def test_a_scored_prompt_has_the_log_probabilities_of_the_decoder(
    network: Network, chunk: int
) -> None:
    slots = Slots(network, 2, 256, chunk=chunk)
    end, found = 0, list[torch.Tensor]()
    while end < LONG.size:
        end, own = slots.read_scored(1, LONG, end)
        found.append(own)
    scores = Decoder(network, 256, "eager").batch(1).read_whole(LONG[:-1]).log_softmax(-1)
    wanted = scores[torch.arange(LONG.size - 1), torch.from_numpy(LONG[1:])]
    assert torch.allclose(torch.cat(found), wanted, atol=TOLERANCE)
    assert slots.buffers.tokens[1].item() == alone(network, LONG, 1)[0][0]


def test_a_prompt_fills_the_whole_context(network: Network) -> None:
    prompt = np.random.default_rng(0).integers(3, 380, 64)
    for pads in (False, True):
        slots = Slots(network, 2, 64, chunk=48, pads=pads)
        assert read_all(slots, 0, prompt) == 2
        assert slots.buffers.tokens[0].item() == alone(network, prompt, 1)[0][0]


def test_the_others_go_on_beside_a_scored_prompt_that_fills_the_context(network: Network) -> None:
    slots = Slots(network, 2, 64)
    log = Log(slots)
    read_all(slots, 0, SHORT)
    log.note(0)
    assert slots.read_scored(1, np.arange(20, 84), 0)[0] == 64
    for _ in range(3):
        slots.step(2)
        log.note(0)
    assert log.tokens[0] == alone(network, SHORT, 4)[0]


def test_batches_and_recorded_lengths_double() -> None:
    assert [batch_sizes(rows) for rows in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert [lengths(chunk) for chunk in (24, 64, 256)] == [[24], [64], [64, 128, 256]]


def test_a_context_beyond_the_window_is_refused(network: Network) -> None:
    with pytest.raises(UnsupportedError, match="looks back 64 tokens, and 65 are asked"):
        Slots(network._replace(window=64), 2, 65)


@pytest.mark.slow
def test_compiled_steps_of_shared_rows_give_the_same_answers(network: Network) -> None:
    slots = Slots(network, 2, 128, way="compiled")
    log = Log(slots)
    for row, prompt in enumerate((SHORT, LONG)):
        read_all(slots, row, prompt)
        log.note(row)
        slots.step(row + 1)
        log.note(*range(row + 1))
    for row, prompt in enumerate((SHORT, LONG)):
        tokens, log_probs = alone(network, prompt, len(log.tokens[row]))
        assert log.tokens[row] == tokens
        assert log.log_probs[row] == pytest.approx(log_probs, abs=TOLERANCE)
