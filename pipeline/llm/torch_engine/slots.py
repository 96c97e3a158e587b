"""Texts that begin and end at any time, continued together: each has a row of the buffers.

    end = slots.read(row, prompt, begin)    the next part of a prompt; after the last part the row
                                            has its first token
    slots.step(rows)                        one more token of each of the first rows
    slots.move(source, target, tokens)      a text goes to another row
    slots.buffers.tokens, .log_probs        what the rows have got

Calls only send work to the device, in their order. A step runs a batch of 1, 2, 4 ... rows. Rows in
between without a text, or with one that is still read, cost no extra time and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pipeline.llm.reference import Ids
from pipeline.llm.torch_engine.buffers import Buffers
from pipeline.llm.torch_engine.decoder import (
    EAGER,
    Batch,
    Way,
    check_window,
    recorded,
    through,
    way_for,
)
from pipeline.llm.torch_engine.network import Network, choice, logits

CHUNK = 256
"""Tokens of a prompt that are read at once. A GPU then computes about as long as it reads the
weights, and other answers wait no longer.
"""

SHORTEST = 64
"""Prompts shorter than a chunk are padded to 64, 128 ... tokens, each of which is recorded once."""

FACTS = 4
"""Numbers beside the tokens that are read: row, first position, index of the last token, position
of the row afterwards.
"""

Reader = Callable[[torch.Tensor], None]


class Slots:
    """The rows, and the work on them.

    `sizes`: of the batches, ascending; the last one has all rows. `pads`: read recorded lengths,
    as on a GPU. UnsupportedError for texts longer than the network's window.
    """

    def __init__(
        self,
        network: Network,
        rows: int,
        context: int,
        *,
        chunk: int = CHUNK,
        sizes: Sequence[int] = (),
        way: Way | None = None,
        pads: bool | None = None,
    ) -> None:
        check_window(network, context)
        self.rows, self._network = rows, network
        self.buffers = Buffers.for_network(network, rows, context)
        self.device = network.embedding.device
        self.last = self.buffers.context - 1  # a place that no text which goes on has
        self._chunk = min(chunk, self.buffers.context)
        self._batches = {
            size: Batch(network, size, context, way or way_for(network, size), self.buffers)
            for size in sizes or batch_sizes(rows)
        }
        self._starts, self._following = dict[int, Reader](), None
        if self.device.type == "cuda" if pads is None else pads:
            self._starts = {
                tokens: self._reader(tokens, is_start=True) for tokens in lengths(self._chunk)
            }
            self._following = self._reader(self._chunk, is_start=False)
        with torch.no_grad():
            self.buffers.positions.fill_(self.last)

    # -- prompts -----------------------------------------------------------------

    def read(self, row: int, prompt: Ids, begin: int) -> int:
        """Read a part of a prompt into a row, from `begin`. Return its end, where the next part
        begins.
        """
        end = min(begin + self._chunk, prompt.size)
        with torch.no_grad():
            if self._following is None:
                self._read(self._given(row, prompt, begin, end), is_start=not begin)
            elif begin:  # the last part reads some tokens again instead of padding
                self._following(self._given(row, prompt, end - self._chunk, end))
            else:
                padded = next(length for length in self._starts if length >= end)
                self._starts[padded](self._given(row, prompt, 0, end, padded))
        return end

    def read_scored(self, row: int, prompt: Ids, begin: int) -> tuple[int, torch.Tensor]:
        """Read as `read` does. Return the end, and the log-probabilities of the tokens that follow
        those which were read: [n] fp32, on the device. The last token of a prompt has none after
        it.
        """
        end = min(begin + self._chunk, prompt.size)
        following = torch.from_numpy(prompt[begin + 1 : end + 1]).to(self.device)
        network = self._network
        with torch.no_grad():
            x = self._read(self._given(row, prompt, begin, end), is_start=not begin)
            x = x[0, : following.numel()]
            scores = logits(x, network.norm, network.logits, network.shape.epsilon)
            return end, scores.log_softmax(-1).gather(-1, following[:, None])[:, 0]

    def _given(self, row: int, prompt: Ids, begin: int, end: int, padded: int = 0) -> torch.Tensor:
        """Return what a reader needs, on the device: [FACTS + tokens] int64."""
        # a prompt that fills the context is only scored: its row may be stepped, but not further
        after = min(prompt.size, self.last) if end == prompt.size else self.last
        given = torch.zeros(FACTS + (padded or end - begin), dtype=torch.int64)
        given[:FACTS] = torch.tensor([row, begin, end - begin - 1, after])
        given[FACTS : FACTS + end - begin] = torch.from_numpy(prompt[begin:end])
        return given.to(self.device, non_blocking=True)

    def _reader(self, tokens: int, *, is_start: bool) -> Reader:
        """Return what reads exactly this number of tokens, recorded on a GPU."""
        given = torch.zeros(FACTS + tokens, dtype=torch.int64, device=self.device)

        def work() -> None:
            self._read(given, is_start=is_start)

        with torch.no_grad():
            again = recorded(work, self.device, self.buffers.graphs)

        def read(new: torch.Tensor) -> None:
            given.copy_(new)
            again()

        return read

    def _read(self, given: torch.Tensor, *, is_start: bool) -> torch.Tensor:
        """Read tokens into a row, and choose the one after them. Return what the layers made of
        them, [1, tokens, hidden].

        What padding leaves in the cache is never seen: the text writes over it.
        """
        network, buffers = self._network, self.buffers
        row, first, last, after = given[:FACTS].split(1)
        tokens = given[FACTS:]
        places = first + torch.arange(tokens.numel(), device=self.device)
        place = buffers.place_of(places[None], row, is_start=is_start)
        x = through(network.embedding[tokens][None], network, buffers.caches, place, EAGER)
        scores = logits(x[0, last], network.norm, network.logits, network.shape.epsilon)
        token, log_prob = choice(scores)
        buffers.scores[row] = scores
        buffers.tokens[row] = token
        buffers.log_probs[row] = log_prob
        buffers.positions[row] = after
        return x

    # -- answers -----------------------------------------------------------------

    def size_for(self, rows: int) -> int:
        """Return the size of the smallest batch that holds this number of rows."""
        return next(size for size in self._batches if size >= rows)

    def step(self, rows: int) -> None:
        """Make one token of each of the first rows. Row 0 must have a text if it is alone."""
        with torch.no_grad():
            self._batches[self.size_for(rows)].step()

    def move(self, source: int, target: int, tokens: int) -> None:
        """Move a text, of which at most this number of tokens was read, to a row without one."""
        buffers = self.buffers
        with torch.no_grad():
            for each in (buffers.keys, buffers.values):
                each[:, target, :, :tokens] = each[:, source, :, :tokens]
            for each in (buffers.tokens, buffers.positions):
                each[target] = each[source]
            buffers.positions[source] = self.last


def batch_sizes(rows: int) -> list[int]:
    """Return 1, 2, 4 ... and the number of rows."""
    return [*(1 << n for n in range(rows.bit_length()) if 1 << n < rows), rows]


def lengths(chunk: int) -> list[int]:
    """Return the lengths of prompts that are recorded: 64, 128 ... and that of a chunk."""
    found, length = list[int](), SHORTEST
    while length < chunk:
        found.append(length)
        length *= 2
    return [*found, chunk]
