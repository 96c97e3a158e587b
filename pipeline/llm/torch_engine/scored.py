"""An opened engine of our decoder as the gate scores it and as the race times it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.llm.engine import LanguageEngine
from pipeline.llm.hf import use_cores
from pipeline.llm.reference import Ids
from pipeline.llm.served import Generation, Room
from pipeline.llm.torch_engine.decoder import Decoder
from pipeline.llm.torch_engine.files import read_network
from pipeline.llm.torch_engine.slots import Slots
from pipeline.llm.ways import STEP_TOKENS

Logs = NDArray[np.float64]

ROWS = 256
"""Tokens whose scores are in fp64 on the device at once: 0.3 GB for a vocabulary of 128,000."""


class ScoredDecoder:
    """Answers by the steps that serve, and scores texts that are read at once."""

    def __init__(self, engine: LanguageEngine, room: Room) -> None:
        use_cores(room.threads)
        network = read_network(engine.root, "cuda" if engine.is_on_gpu else "cpu")
        self._decoder = Decoder(network, room.context)
        self.graph = SteppedDecoder(self._decoder, engine)

    def log_probs(self, ids: Ids) -> Logs:
        """Return the log-probability of each token after the first: [n - 1]."""
        scores = self._decoder.batch(1).read_whole(ids[:-1])
        tokens = torch.from_numpy(ids[1:])[:, None].to(scores.device)
        own = [
            part.double().log_softmax(-1).gather(-1, chosen)
            for part, chosen in zip(scores.split(ROWS), tokens.split(ROWS), strict=True)
        ]
        found: Logs = torch.cat(own)[:, 0].cpu().numpy()
        return found

    def generate(self, prompt: Ids, tokens: int) -> Generation:
        (answer,) = self._decoder.generate_together([prompt], tokens)
        return answer

    def generate_together(self, prompts: Sequence[Ids], tokens: int) -> tuple[Generation, ...]:
        """Continue prompts that start together."""
        return self._decoder.generate_together(prompts, tokens)

    def generate_in_slots(self, prompts: Sequence[Ids], tokens: int) -> tuple[Generation, ...]:
        """Continue prompts of which each begins a step after the one before, in the slots that
        serve, and is read in chunks of STEP_TOKENS. Without times.
        """
        network, count = self._decoder.network, len(prompts)
        sizes = sorted({1, count})  # steps that the other ways have recorded, too
        slots = Slots(network, count, self._decoder.context, chunk=STEP_TOKENS, sizes=sizes)
        buffers, found = slots.buffers, list[torch.Tensor]()  # [2, rows] each
        places = [list[int]() for _ in prompts]  # of the tokens of each answer in `found`

        def note(rows: Iterable[int]) -> None:
            for row in rows:
                places[row].append(len(found))
            found.append(torch.stack([buffers.tokens.double(), buffers.log_probs.double()]))

        for row, prompt in enumerate(prompts):
            end = 0
            while end < prompt.size:
                end = slots.read(row, prompt, end)
            note([row])
            slots.step(row + 1)
            note(range(row + 1))
        while len(places[-1]) < tokens:
            slots.step(count)
            note(range(count))
        values = torch.stack(found).cpu().numpy()
        return tuple(
            Generation(
                values[at[:tokens], 0, row].astype(np.int64), values[at[:tokens], 1, row], ()
            )
            for row, at in enumerate(places)
        )

    def cache_bytes_per_token(self) -> float:
        return self._decoder.cache_bytes_per_token()


class SteppedDecoder:
    """Whole distributions: texts are read at once, and their last tokens by the recorded step."""

    def __init__(self, decoder: Decoder, engine: LanguageEngine) -> None:
        self._decoder = decoder
        weights = "" if engine.recipe is None else engine.recipe.weights
        self.facts = {
            "device": engine.target.device,
            "step": decoder.batch(1).way,
            "weights": weights,
            "activations": name_of(decoder.network.embedding.dtype),
        }
        if weights.startswith("int4"):
            self.facts["output head"] = name_of(decoder.network.logits.weight.dtype)

    def log_probs(self, ids: Ids, one_by_one: int) -> Logs:
        """Return the log-probabilities of all successors, [n, vocabulary]."""
        batch = self._decoder.batch(1)
        first = ids.size - one_by_one
        parts = [batch.read_whole(ids[:first])]
        parts += [batch.read_next([int(token)]) for token in ids[first:]]
        scores = torch.cat(parts).split(ROWS)
        found: Logs = torch.cat([part.double().log_softmax(-1).cpu() for part in scores]).numpy()
        return found


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
