"""What a run of the user's PyTorch module showed about its code."""

from __future__ import annotations

from pydantic import Field

from pipeline.core.frozen import Frozen


class Wait(Frozen):
    """A call in the module that waits for the device."""

    call: str = Field(description="As in the code, such as `.item()`.")
    where: str = Field(description="File and line; empty: inside a module of PyTorch itself.")
    count: int = Field(description="How often one run of the module makes the call.")


class CompiledGraphs(Frozen):
    """What torch.compile makes of the module: one graph without breaks is best."""

    graphs: int = Field(description="Graphs at the first size.")
    breaks: int = Field(description="How often it had to leave the graph, at the first size.")
    first_break: str = Field(default="", description="The reason of the first break.")
    where: str = Field(default="", description="File and line of the first break.")
    recompiles: int = Field(description="Graphs that it compiled again for the other sizes.")
    sizes: int = Field(description="How many sizes it ran at: opt, min and max of each profile.")


class ModuleFindings(Frozen):
    """Calls that wait for the device, and what torch.compile makes of the module."""

    waits: tuple[Wait, ...] = Field(
        default=(), description="In the order of their first in one run, at opt."
    )
    graphs: CompiledGraphs | None = Field(
        default=None, description="null: the plan has no baseline with torch.compile."
    )
    failure: str = Field(default="", description="Why the module could not be examined.")
