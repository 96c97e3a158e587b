"""`crucible advise`: what would make a compiled engine faster, and by how much."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.formatting import shape_text, time_text
from pipeline.results.advice import MIN_GAIN, Advice, Attempt


def advice_lines(advice: Advice) -> Iterator[str]:
    """Yield the advice, then every other attempt with its reason, as text."""
    measured = f", {time_text(advice.latency_s)} end to end" if advice.latency_s else ""
    yield f"{advice.label} at {shape_text(advice.sizes)}{measured}"
    for attempt in advice.advised:
        yield f"advice: {attempt.rule}: {attempt.reason}; {gain_text(attempt, advice)}"
        yield f"  how: {attempt.how}"
    if not advice.advised:
        yield (
            f"nothing above {MIN_GAIN:.0%}: these changes were tried"
            if advice.attempts
            else ("no rule found anything to change")
        )
    for attempt in advice.attempts:
        if attempt not in advice.advised:
            parts = [attempt.outcome, attempt.detail]
            if attempt.gain:
                parts.append(gain_text(attempt, advice))
            outcome = "; ".join(filter(None, parts))
            yield f"not advised: {attempt.rule}: {attempt.reason}; {outcome}"


def gain_text(attempt: Attempt, advice: Advice) -> str:
    """`saves 7.1 % to 8.9 %, about 28 us`."""
    gain = attempt.gain
    assert gain is not None
    text = f"saves {gain.low * 100:.1f} % to {gain.high * 100:.1f} %"
    if advice.latency_s and gain.value > 0:
        text += f", about {time_text(gain.value * advice.latency_s)}"
    return text
