"""Whether an answer depends on how it is served: alone, in a batch, with a prefix from the cache,
or with its prompt read in chunks.

All ways compute the same sums in another order or shape, so they differ by rounding.
Log-probabilities are compared up to the first token that differs: after it, the texts differ too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from pipeline.core.frozen import Frozen
from pipeline.llm.served import Generation

STEP_TOKENS = 24
"""Of a chunk: no multiple of a block of the cache, and less than half of a prompt."""


class WayScore(Frozen):
    """Greedy answers served in one way, beside the same ones alone."""

    way: str = Field(description="How the answers were served.")
    difference: float = Field(
        description="Mean of the absolute differences of log-probabilities, nats."
    )
    largest_difference: float = Field(description="The largest one, nats.")
    answers: int = Field(description="How many were compared.")
    changed: int = Field(description="Answers of which a token differs.")

    @property
    def changed_share(self) -> float:
        return self.changed / self.answers


def way_score(way: str, alone: Sequence[Generation], others: Sequence[Generation]) -> WayScore:
    """Compare answers of the same prompts."""
    differences, changed = [], 0
    for one, other in zip(alone, others, strict=True):
        differing = np.flatnonzero(one.tokens != other.tokens)
        common = int(differing[0]) if differing.size else one.tokens.size
        differences.append(np.abs(one.log_probs[:common] - other.log_probs[:common]))
        changed += bool(differing.size)
    # if the first tokens of all answers differ, nothing agrees
    found = np.concatenate(differences) if any(map(len, differences)) else np.array([np.inf])
    return WayScore(
        way=way,
        difference=float(found.mean()),
        largest_difference=float(found.max()),
        answers=len(alone),
        changed=changed,
    )
