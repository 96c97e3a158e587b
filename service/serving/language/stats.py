"""Statistics of language models: the Prometheus metrics of all, and the totals of one version since
its load. docs/reference/metrics.md lists the metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from service.inference import Statistics, Total
from service.serving.stats import LABELS, SECONDS

AnswerState = Literal["stop", "length", "cancelled", "timed_out", "refused", "failed"]
STATES: tuple[AnswerState, ...] = ("stop", "length", "cancelled", "timed_out", "refused", "failed")
TOKEN_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
)


class LanguageFigures:
    """The Prometheus metrics of all language models of one server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.answers = Counter(
            "crucible_language_answers_total",
            "Answers by how they ended: stop, by the model or a stop text; length, at the limit;"
            " cancelled, by the client; timed_out; refused; failed",
            (*LABELS, "state"),
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "crucible_language_prompt_tokens_total",
            "Tokens of the prompts of accepted requests",
            LABELS,
            registry=registry,
        )
        self.generated_tokens = Counter(
            "crucible_language_generated_tokens_total",
            "Tokens that were generated",
            LABELS,
            registry=registry,
        )
        self.first_token = Histogram(
            "crucible_language_first_token_seconds",
            "Time from a request to the first token of its answer, with the wait for its turn",
            LABELS,
            buckets=SECONDS,
            registry=registry,
        )
        self.next_token = Histogram(
            "crucible_language_next_token_seconds",
            "Time between two tokens of an answer",
            LABELS,
            buckets=TOKEN_SECONDS,
            registry=registry,
        )
        self.running = Gauge(
            "crucible_language_running", "Answers that are generated now", LABELS, registry=registry
        )
        self.waiting = Gauge(
            "crucible_language_queue", "Requests that wait now", LABELS, registry=registry
        )
        self.cache = Gauge(
            "crucible_language_cache_ratio",
            "Share of the cache of keys and values that running answers use",
            LABELS,
            registry=registry,
        )
        # A reloaded version has two tallies for a moment.
        self.newest: dict[tuple[str, str], LanguageTally] = {}


class LanguageTally:
    """The statistics of one deployed version."""

    def __init__(self, figures: LanguageFigures, model: str, version: int) -> None:
        self._figures, self._model, self._version = figures, model, version
        self._labels = (model, str(version))
        self._answers = {state: figures.answers.labels(*self._labels, state) for state in STATES}
        self._prompt = figures.prompt_tokens.labels(*self._labels)
        self._generated = figures.generated_tokens.labels(*self._labels)
        self._first = figures.first_token.labels(*self._labels)
        self._next = figures.next_token.labels(*self._labels)
        self._succeeded = self._failed = self._queue = Total()
        self._tokens = self._cancelled = self._last_ms = 0

    def show(
        self,
        running: Callable[[], float],
        waiting: Callable[[], float],
        cache: Callable[[], float],
    ) -> None:
        """Show the gauges of this deployment in the metrics, in place of those of an earlier one of
        the same version.
        """
        for gauge, value in zip(self._gauges, (running, waiting, cache), strict=True):
            gauge.labels(*self._labels).set_function(value)
        self._figures.newest[self._labels] = self

    @property
    def _gauges(self) -> tuple[Gauge, Gauge, Gauge]:
        return self._figures.running, self._figures.waiting, self._figures.cache

    def accepted(self, prompt_tokens: int) -> None:
        """Count the tokens of a prompt."""
        self._prompt.inc(prompt_tokens)

    def generated(self, tokens: int, first_s: float | None, gap_s: float) -> None:
        """Count tokens that came together. `first_s`: from the request, if the first is among them;
        `gap_s`: since the token before.
        """
        self._generated.inc(tokens)
        self._tokens += tokens
        if first_s is not None:
            self._first.observe(first_s)
            tokens -= 1
        for _ in range(tokens):
            self._next.observe(gap_s / tokens)

    def ended(self, state: AnswerState, total_s: float, queue_s: float) -> None:
        """Count an answer that has ended."""
        self._answers[state].inc()
        self._last_ms = time.time_ns() // 1_000_000
        if state == "cancelled":
            self._cancelled += 1
        elif state in ("stop", "length"):
            self._succeeded = _plus(self._succeeded, total_s)
            self._queue = _plus(self._queue, queue_s)
        else:
            self._failed = _plus(self._failed, total_s)

    def statistics(self) -> Statistics:
        """The totals; `rows` are the generated tokens."""
        none = Total()
        return Statistics(
            model=self._model,
            version=self._version,
            succeeded=self._succeeded,
            failed=self._failed,
            queue=self._queue,
            copy_in=none,
            compute=none,
            copy_out=none,
            executions=self._succeeded.count,
            rows=self._tokens,
            dropped=self._cancelled,
            last_request_ms=self._last_ms,
        )

    @property
    def seconds_per_answer(self) -> float:
        """The average time of an answer; 0 without one."""
        return self._succeeded.seconds / max(self._succeeded.count, 1)

    def close(self) -> None:
        """Remove the gauges from the metrics. The counters stay."""
        if self._figures.newest.get(self._labels) is self:
            del self._figures.newest[self._labels]
            for gauge in self._gauges:
                gauge.remove(*self._labels)


def _plus(total: Total, seconds: float) -> Total:
    return Total(total.count + 1, total.seconds + seconds)
