"""Word error rate, by jiwer: the wrong, missing and additional words, per word of the labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.accuracy.metrics.arithmetic import Floats
from pipeline.accuracy.metrics.metric import MANY_RESAMPLES, Batches, Decode, Metric, Picks, joined
from pipeline.errors import DataError


def word_error_rate(decode: Decode) -> Metric:
    """Return the word error rate of decoded texts. Words count as they are written."""
    return Metric(
        "wer",
        _evaluate,
        decode=decode,
        lower_is_better=True,
        hides_nan=True,
        resamples=MANY_RESAMPLES,
    )


@dataclass(frozen=True, slots=True)
class _ErrorRate:
    """The errors and the words of each sample. The score is negative: it counts errors."""

    errors: Floats  # [samples]
    words: Floats  # [samples]

    @property
    def units(self) -> int:
        return self.errors.size

    @property
    def classes(self) -> Mapping[int, int]:
        return {}

    def score(self, picks: Picks) -> float:
        total = float(self.words[picks].sum())
        return -float(self.errors[picks].sum()) / total if total else float("nan")

    def class_scores(self, numbers: Sequence[int], picks: Picks) -> Floats:
        raise NotImplementedError("a word error rate has no classes")


def _evaluate(records: Batches, labels: Batches | None, reference: Batches) -> _ErrorRate:
    counts = [
        _word_errors(str(label), text)
        for text, label in zip(joined(records), joined(labels or ()), strict=True)
    ]
    errors, words = np.array(counts, dtype=np.float64).T
    return _ErrorRate(errors, words)


def _word_errors(label: str, text: object) -> tuple[int, int]:
    """Return the errors of a text, and the words of its label."""
    import jiwer

    if not isinstance(text, str):
        raise DataError(
            f"wer needs texts, and the decoder gives {type(text).__name__}",
            "correct the function of `accuracy.decode`",
        )
    found = jiwer.process_words([label], [text])
    errors = found.substitutions + found.deletions + found.insertions
    return errors, found.hits + found.substitutions + found.deletions
