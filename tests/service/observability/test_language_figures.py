"""Live figures of a language model, from the metrics that its deployment counts."""

from types import SimpleNamespace

from prometheus_client import CollectorRegistry

from service.observability.language_figures import language_counts_of, language_figures_between
from service.observability.live_figures import Counts, counts_of, figures_between
from service.pages.rendering import fragment
from service.registry.models import DeploymentView
from service.serving.language.stats import LanguageFigures, LanguageTally


def shown(figures: LanguageFigures, model: str, version: int) -> LanguageTally:
    """A deployment of which two answers run, and three requests wait."""
    tally = LanguageTally(figures, model, version)
    tally.show(lambda: 2.0, lambda: 3.0, lambda: version / 4)
    return tally


def answer(tally: LanguageTally, first_s: float, next_s: float, tokens: int) -> None:
    tally.accepted(10)
    tally.generated(1, first_s, first_s)
    for _ in range(tokens - 1):
        tally.generated(1, None, next_s)
    tally.ended("stop", 1.0, 0.0)


def test_figures_are_those_of_the_time_between_and_of_all_versions() -> None:
    registry = CollectorRegistry()
    figures = LanguageFigures(registry)
    one, two, other = (shown(figures, *of) for of in (("m", 1), ("m", 2), ("other", 1)))
    answer(one, 50.0, 2.0, 9)
    before = counts_of(registry, "m", 10.0)
    for _ in range(4):
        answer(two, 0.3, 0.015, 5)
        answer(other, 50.0, 2.0, 50)
    two.ended("failed", 1.0, 0.0)
    two.ended("cancelled", 1.0, 0.0)
    found = figures_between(before, counts_of(registry, "m", 12.0)).language

    assert found is not None
    assert (found.generated_per_s, found.prompt_per_s) == (10.0, 20.0)
    assert (found.answered_per_s, found.errors_per_s) == (2.0, 0.5)
    assert (found.running, found.waiting, found.cache_ratio) == (4, 6, 0.5)
    first, following = found.first_token, found.next_token
    assert first.p50_s is not None
    assert first.p99_s is not None
    assert 0.25 <= first.p50_s <= first.p99_s <= 0.5, "the bounds around 0.3"
    assert following.p50_s is not None
    assert 0.01 <= following.p50_s <= 0.02, "the bounds around 0.015"


def test_a_model_with_inputs_has_none() -> None:
    registry = CollectorRegistry()
    shown(LanguageFigures(registry), "other", 1)
    assert language_counts_of(registry, "m") is None
    assert language_figures_between(None, None, 1.0) is None


def test_the_page_shows_tokens_and_not_batches() -> None:
    registry = CollectorRegistry()
    answer(shown(LanguageFigures(registry), "m", 1), 0.3, 0.015, 21)
    deployment = DeploymentView(state="ready", version=1, device="cpu", options=None)

    def html(window_s: float) -> str:
        return fragment(
            "model_figures.html",
            model=SimpleNamespace(deployment=deployment),
            instances=1,
            figures=figures_between(Counts(0.0), counts_of(registry, "m", window_s)),
        )

    assert "<dt>Tokens per second</dt><dd>10.5</dd>" in html(2.0)
    assert "<dt>Tokens per second</dt><dd>-</dd>" in html(0.0)
    for text in ("<dt>Answers that run</dt><dd>2</dd>", "wait</dt><dd>3</dd>", "<dd>25 %</dd>"):
        assert text in html(2.0)
    assert "First token, p50 / p99" in html(2.0)
    assert "Compute of a batch" not in html(2.0)
