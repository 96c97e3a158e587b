"""Live figures, from the metrics that deployments count."""

from prometheus_client import CollectorRegistry

from service.inference import Timing
from service.observability.live_figures import Counts, counts_of, figures_between
from service.serving.stats import Figures, InputValues, Tally


def test_figures_are_those_of_the_time_between() -> None:
    registry = CollectorRegistry()
    figures = Figures(registry)
    tallies = {name: Tally(figures, name, 1, ("cpu",), lambda: 3) for name in ("m", "other")}
    for tally in tallies.values():
        tally.show()

    def answer(name: str, compute_s: float) -> None:
        timing = Timing(0.0, 0.0, compute_s, 0.0, 1)
        tallies[name].ran("cpu", 1, timing, InputValues(1, 1, 1))
        tallies[name].answered(timing, compute_s)

    answer("m", 50.0)
    before = counts_of(registry, "m", 10.0)
    for _ in range(4):
        answer("m", 0.02)
        answer("other", 5.0)
    tallies["m"].failed("timed_out", 1.0)
    after = counts_of(registry, "m", 12.0)

    found = figures_between(before, after)
    assert (found.window_s, found.answered_per_s, found.errors_per_s) == (2.0, 2.0, 0.5)
    assert found.waiting == 3
    assert found.compute.p50_s is not None
    assert found.compute.p99_s is not None
    assert 0.01 < found.compute.p50_s < found.compute.p99_s <= 0.025, "the bounds around 0.02"
    assert found.queue.p99_s is not None
    assert found.queue.p99_s <= 0.0001, "the lowest bound"
    answer("m", 1000.0)
    beyond = figures_between(after, counts_of(registry, "m", 13.0))
    assert beyond.compute.p50_s == 60.0, "the highest bound"


def test_without_requests_there_are_no_percentiles() -> None:
    registry = CollectorRegistry()
    Figures(registry)
    found = figures_between(Counts(5.0), counts_of(registry, "m", 5.0))
    assert (found.answered_per_s, found.waiting) == (0.0, 0)
    assert found.compute.p50_s is None
