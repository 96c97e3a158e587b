"""`crucible advise` in words: what makes a compiled engine faster, and by how much."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.formatting import shape_text, time_text
from pipeline.report.latency_sections import gain_text
from pipeline.results.advice import Advice


def advice_lines(advice: Advice) -> Iterator[str]:
    """Yield the advice, the conclusion, and every other attempt with its reason."""
    measured = f", {time_text(advice.latency_s)} end to end" if advice.latency_s else ""
    if advice.note:
        yield advice.note
    yield f"{advice.label} at {shape_text(advice.sizes)}{measured}"
    for attempt in advice.advised:
        yield f"advice {attempt.rule}: {attempt.reason}; {gain_text(attempt, advice)}"
        yield f"  how: {attempt.how}"
    yield advice.conclusion
    for attempt in advice.attempts:
        if attempt not in advice.advised:
            gain = gain_text(attempt, advice) if attempt.gain else ""
            outcome = "; ".join(filter(None, (str(attempt.outcome), attempt.detail, gain)))
            yield f"not advised {attempt.rule}: {attempt.reason}; {outcome}"
