"""Why the interval of a gain stayed wide."""

from __future__ import annotations

from pipeline.measurement.clock import Samples
from pipeline.measurement.comparison import pairs_of, processes_from_samples

MANY_WAITED = 0.25  # of the processes: then what else runs on the host made the interval wide


def why_wide(baseline: Samples, changed: Samples, most_pairs: int, budget_s: float) -> str:
    """Return why two engines could not be compared more narrowly, and what helps.

    `most_pairs`: pairs of processes after which a race ends in any case. `budget_s`: its time.
    """
    pairs = pairs_of(processes_from_samples(baseline), processes_from_samples(changed))
    total, waited = pairs.has_waited.size, int(pairs.has_waited.sum())
    if waited > MANY_WAITED * total:
        return f"{waited} of {total} processes waited for a CPU: measure on a quiet host"
    if pairs.undisturbed < most_pairs:
        return (
            f"the time for measuring was over after {total} processes of each engine: raise"
            f" benchmark.budget_s, which is {budget_s:g}"
        )
    spread = pairs.slowest_over_fastest()
    return (
        f"the times of {total} processes of each engine differ by up to {spread:.2f} times, though"
        " hardly one waited for a CPU"
    )
