"""The gate on made-up scores, and the divergence it rests on."""

import math

import numpy as np
import pytest

from pipeline.llm.gate import judge
from pipeline.llm.plan import LanguageAccuracy
from pipeline.llm.reference import ReferenceDocument
from pipeline.llm.scoring import (
    DocumentScore,
    GreedyScore,
    Scores,
    divergence,
    log_softmax,
    score_document,
)
from pipeline.llm.served import Generation
from pipeline.llm.ways import WayScore, way_score


def scores(extra: float = 0.0, cached: float = 0.0, path: float = 0.0, kl: float = 0.0) -> Scores:
    """Twenty texts of 100 tokens, whose loss is higher by `extra` and `cached` nats a token."""
    noise = np.random.default_rng(0).normal(0, 1e-4, 20)
    documents = tuple(
        DocumentScore(
            tokens=100,
            reference_loss=300.0,
            loss=300.0 + 100 * (extra + each),
            cached_tokens=10,
            cached_reference_loss=30.0,
            cached_loss=30.0 + 10 * (cached + each),
            divergence=100 * kl,
            agreeing=90,
        )
        for each in noise
    )
    return Scores(
        documents=documents,
        greedy=(GreedyScore(tokens=50, equal=50), GreedyScore(tokens=50, equal=20)),
        path_difference=path,
        largest_path_difference=path,
        facts={},
    )


def test_equal_answers_pass() -> None:
    judged = judge(scores(), LanguageAccuracy(max_kl=0.1, min_agreement=0.8))
    assert judged.passed
    assert judged.perplexity_increase.value == pytest.approx(0, abs=1e-3)
    assert judged.agreement.value == pytest.approx(0.9)
    assert judged.greedy_equal == 0.7
    assert judged.tokens == 2000


@pytest.mark.parametrize(
    ("given", "limits", "message"),
    [
        (scores(extra=0.05), LanguageAccuracy(), "texts read at once changes by 5.13 %"),
        (scores(cached=0.05), LanguageAccuracy(), "texts read one by one changes by 5.13 %"),
        (scores(kl=0.2), LanguageAccuracy(max_kl=0.1), "divergence of 0.2000 nats"),
        (scores(), LanguageAccuracy(min_agreement=0.95), "90.0% of the likeliest tokens agree"),
        (scores(path=0.3), LanguageAccuracy(), "what it serves is not what was scored"),
        (scores(extra=math.nan), LanguageAccuracy(), "read at once"),
    ],
)
def test_each_limit_is_kept(given: Scores, limits: LanguageAccuracy, message: str) -> None:
    judged = judge(given, limits)
    assert not judged.passed
    assert message in " ".join(judged.failures)


def test_an_answer_that_depends_on_its_batch_is_refused() -> None:
    ways = (
        WayScore(way="from the cache", difference=0.0, largest_difference=0, answers=4, changed=0),
        WayScore(way="in a batch", difference=0.2, largest_difference=0.9, answers=4, changed=1),
    )
    given = scores().model_copy(update={"ways": ways})
    (failure,) = judge(given, LanguageAccuracy()).failures
    assert failure.startswith("an answer in a batch is not the one that it gives alone")
    judged = judge(given, LanguageAccuracy(max_serving_difference=0.3))
    assert judged.passed
    assert judged.ways == ways


def generation(tokens: list[int], log_probs: list[float]) -> Generation:
    return Generation(np.array(tokens), np.array(log_probs), ())


def test_answers_are_compared_up_to_the_first_token_that_differs() -> None:
    alone = [generation([1, 2, 3], [-1.0, -2.0, -3.0]), generation([4, 5], [-1.0, -1.0])]
    other = [generation([1, 2, 9], [-1.0, -2.5, -9.0]), generation([4, 5], [-1.1, -1.0])]
    score = way_score("otherwise", alone, other)
    assert score.difference == pytest.approx(0.6 / 4)
    assert score.largest_difference == pytest.approx(0.5)
    assert (score.answers, score.changed, score.changed_share) == (2, 1, 0.5)
    none = way_score("otherwise", alone[:1], [generation([9, 2, 3], [-1.0, -2.0, -3.0])])
    assert none.difference == math.inf, "no token agrees, so nothing shows that answers do"


def test_the_worse_of_both_ways_counts() -> None:
    assert judge(scores(extra=0.01, cached=0.02), LanguageAccuracy()).worst_increase.value > 0.015


def test_the_divergence_of_all_tokens_is_the_textbooks() -> None:
    random = np.random.default_rng(1)
    wanted, got = log_softmax(random.normal(size=(2, 5, 8)).astype(np.float32))
    textbook = (np.exp(wanted) * (wanted - got)).sum(-1)
    assert divergence(wanted, got) == pytest.approx(textbook, abs=1e-9)
    assert divergence(wanted, wanted) == pytest.approx(np.zeros(5), abs=1e-9)
    part = divergence(wanted[:, :3], got[:, :3])
    assert np.all(part <= textbook + 1e-9), "classes that are put together cannot tell more"


def test_a_text_is_scored_by_its_real_successors() -> None:
    ids = np.array([3, 1, 2, 0])
    logs = log_softmax(np.random.default_rng(2).normal(size=(3, 4)).astype(np.float32))
    own = logs[np.arange(3), ids[1:]]
    order = np.argsort(-logs, -1)
    document = ReferenceDocument(
        ids, own.astype(np.float32), order, np.take_along_axis(logs, order, -1).astype(np.float32)
    )
    score = score_document(document, own, logs, 2)
    assert score.tokens == score.agreeing == 3
    assert score.loss == pytest.approx(score.reference_loss, rel=1e-6)
    assert score.cached_loss == pytest.approx(-float(own[-2:].sum()))
    assert score.divergence == pytest.approx(0, abs=1e-5)
