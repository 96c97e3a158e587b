"""GPU memory and energy of one engine, as part of a report."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.core.frozen import Frozen

CostFigure = Literal["weights", "activations", "GPU memory", "energy"]
"""The figures of a GpuCost, as tables name them."""


class GpuCost(Frozen):
    """GPU memory and energy of one engine at one shape.

    A figure is None if it is not known. `missing` then gives the reason.
    """

    weights_bytes: int | None = None
    activation_bytes: int | None = None  # working memory of the runs
    # of the whole process after its runs, with CUDA's context; its libraries keep what they have
    # allocated, so that is the peak of the runs
    peak_bytes: int | None = None
    # process: by NVML's list of processes; device: what became free when the process ended
    peak_source: Literal["process", "device"] | None = None
    # of the whole GPU, with its idle power, for 1,000 runs
    energy_per_1000_requests_j: float | None = None
    energy_window_s: float | None = None  # between the two values of the counter
    missing: dict[CostFigure, str] = Field(default_factory=dict)

    def with_freed(self, freed_bytes: int) -> GpuCost:
        """Return this with the memory that became free when the process ended as its peak."""
        missing = {name: why for name, why in self.missing.items() if name != "GPU memory"}
        update = {"peak_bytes": freed_bytes, "peak_source": "device", "missing": missing}
        return self.model_copy(update=update)
