"""A synthetic clock, and contestants timed by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from pipeline.measurement.clock import Samples, measure_block, samples_from_blocks


@dataclass
class NoisyHost:
    """A synthetic clock and the work that moves it: noise per run, rare stalls, a level per block,
    and one per round shared by all.
    """

    seed: int
    noise: float = 0.03
    block_level: float = 0.004
    round_level: float = 0.01
    stalls: float = 0.02
    now_s: float = 0.0
    level: float = 1.0
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def clock(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        stall = 1.5 if self.random.random() < self.stalls else 1.0
        self.now_s += (
            seconds * self.level * stall * float(np.exp(self.random.normal(0, self.noise)))
        )


def race(host: NoisyHost, runs_s: tuple[float, ...], rounds: int) -> list[Samples]:
    """Every contestant one block of 50 runs per round, in random order."""
    blocks: list[list[tuple[float, ...]]] = [[] for _ in runs_s]
    for _ in range(rounds):
        shared = float(np.exp(host.random.normal(0, host.round_level)))
        for index in host.random.permutation(len(runs_s)):
            host.level = shared * float(np.exp(host.random.normal(0, host.block_level)))
            run_s = runs_s[index]
            blocks[index].append(
                measure_block(partial(host.work, run_s), host.clock, min_s=50 * run_s)
            )
    return [samples_from_blocks(taken, ()) for taken in blocks]
