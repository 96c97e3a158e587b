"""Figures of answers, goodput and the verdict on it, from made-up times."""

import numpy as np
import pytest

from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import Contestant
from pipeline.core.artifacts import Target
from pipeline.llm.compile import best_of, decide
from pipeline.llm.engine import LanguageEngine
from pipeline.llm.gate import judge
from pipeline.llm.plan import Goodput, LanguageAccuracy, LanguageCandidate
from pipeline.llm.results import LanguageResult
from pipeline.llm.speed.race import Entrant, usual_fields
from pipeline.llm.speed.times import AnswerBlock, AnswerTimes, answer_times, is_good
from pipeline.stages.benchmark import BusyHost
from tests.pipeline.llm.test_gate import scores

HOST = BusyHost(load_1min=0.1, cores=2)
LIMITS = Goodput(max_first_token_s=0.5, max_next_token_s=0.1)
PROCESSES, BLOCKS, TOKENS = 6, 3, 5


def entrant(weights: str | None) -> Entrant:
    recipe = LanguageCandidate.model_validate({"weights": weights}) if weights else None
    target = Target(backend="openvino", version="1", device="CPU")
    return Entrant(
        LanguageEngine.model_construct(
            library="openvino_genai", recipe=recipe, target=target, weight_bytes=8
        )
    )


def contestant(weights: str | None, *levels: tuple[int, float, float]) -> Contestant[Entrant]:
    """Each level: requests at once, time to the first token, time between tokens, in seconds."""
    role = Role.CANDIDATE if weights else Role.BASELINE
    made = Contestant(entrant(weights), role, [[] for _ in levels], [[] for _ in levels])
    noise = np.random.default_rng(len(weights or ""))
    for generation in range(PROCESSES):
        made.generations.append(generation)
        for index, (requests, first_s, next_s) in enumerate(levels):
            made.processes[index].append(BLOCKS)
            for _ in range(BLOCKS):
                factor = 1 + noise.uniform(0, 0.01)
                answer = tuple(factor * (first_s + step * next_s) for step in range(TOKENS))
                made.blocks[index].append(
                    AnswerBlock(
                        **usual_fields((answer[-1],), 0.0),
                        answers=(answer,) * requests,
                        cache_bytes_per_token=100.0,
                    )
                )
    return made


def times_of(
    candidate: Contestant[Entrant], baseline: Contestant[Entrant], limits: Goodput | None
) -> AnswerTimes:
    return answer_times(candidate, baseline, (1, 4), limits, HOST)


def test_figures_of_each_level_are_of_its_own_answers() -> None:
    slow = contestant(None, (1, 0.4, 0.2), (4, 1.6, 0.2))
    fast = contestant("int8", (1, 0.2, 0.1), (4, 0.4, 0.1))
    times = times_of(fast, slow, None)
    alone, together = times.levels
    assert (alone.concurrency, together.concurrency) == (1, 4)
    assert alone.first_token_s == pytest.approx(0.2, rel=0.02)
    assert together.first_token_s == pytest.approx(0.4, rel=0.02)
    assert together.next_token_s == pytest.approx(0.1, rel=0.02)
    assert alone.tokens_per_s == pytest.approx(TOKENS / 0.6, rel=0.02)
    assert together.tokens_per_s == pytest.approx(4 * TOKENS / 0.8, rel=0.02)
    assert together.user_tokens_per_s == pytest.approx(TOKENS / 0.8, rel=0.02)
    assert together.next_token_p95_s is not None, "288 tokens have a p95"
    assert alone.next_token_p95_s is None, "72 tokens have none"
    assert alone.goodput_per_s is None
    assert times.ratio == alone.ratio
    assert times.ratio is not None
    assert times.ratio.value == pytest.approx(2, rel=0.02)
    assert times_of(slow, slow, None).ratio is None, "it is the baseline"


@pytest.mark.parametrize(
    ("answer", "good"),
    [
        ((0.5, 0.6, 0.7), True),
        ((0.51, 0.6, 0.7), False),
        ((0.1, 0.25, 0.29), True),  # the mean counts
        ((0.1, 0.2, 0.31), False),
        ((0.1,), True),
    ],
)
def test_an_answer_is_good_within_both_limits(answer: tuple[float, ...], good: bool) -> None:
    assert is_good(answer, LIMITS) is good


def test_goodput_is_compared_at_the_best_level_of_each() -> None:
    baseline = contestant(None, (1, 0.2, 0.05), (4, 0.4, 0.2))
    candidate = contestant("int8", (1, 0.2, 0.05), (4, 0.4, 0.05))
    times = times_of(candidate, baseline, LIMITS)
    assert [level.good_share for level in times.levels] == [1, 1]
    assert times.goodput_per_s == pytest.approx(4 / 0.6, rel=0.02)
    assert times.ratio is not None
    assert times.ratio.value == pytest.approx((4 / 0.6) / (1 / 0.4), rel=0.02)


def decided(baseline: Contestant[Entrant], *others: Contestant[Entrant]) -> tuple[str, str, str]:
    """Verdict, winner and headline."""
    first = answer_times(baseline, baseline, (1, 4), LIMITS, HOST)
    rows = [times_of(each, baseline, LIMITS) for each in others]
    judged = judge(scores(), LanguageAccuracy())
    results = [LanguageResult(label=row.label, judged=judged, times=row) for row in rows]
    best = best_of(rows, LIMITS)
    found = decide(first, best, judged if best else None, results, LIMITS)
    return found.verdict, found.winner, found.headline


def test_the_most_good_answers_win_though_others_answer_sooner() -> None:
    baseline = contestant(None, (1, 0.2, 0.09), (4, 0.4, 0.2))
    sooner = contestant("int8", (1, 0.1, 0.02), (4, 0.6, 0.05))
    more = contestant("fp16", (1, 0.2, 0.05), (4, 0.4, 0.05))
    verdict, winner, headline = decided(baseline, sooner, more)
    assert (verdict, winner) == ("accepted", "fp16 kv-u8")
    assert "as many answers within 0.5 s to the first token" in headline


def test_a_baseline_without_a_good_answer_is_beaten_without_a_ratio() -> None:
    baseline = contestant(None, (1, 0.6, 0.09), (4, 2.0, 0.2))
    verdict, winner, headline = decided(baseline, contestant("int8", (1, 0.1, 0.02), (4, 2, 0.2)))
    assert (verdict, winner) == ("accepted", "int8 kv-u8")
    assert "transformers fp32 gives none" in headline


def test_no_winner_where_no_answer_is_good() -> None:
    baseline = contestant(None, (1, 0.6, 0.09), (4, 2.0, 0.2))
    verdict, winner, headline = decided(baseline, contestant("int8", (1, 0.6, 0.02), (4, 2, 0.2)))
    assert (verdict, winner) == ("rejected", "")
    assert headline == "No answer of any candidate is within the limits of the objective."
