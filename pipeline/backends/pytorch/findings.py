"""Run the user's module once, and find what in its code keeps it from running fast."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from pipeline.backends.pytorch.backend import usable_target
from pipeline.backends.pytorch.cuda import DEVICE
from pipeline.backends.pytorch.graph_breaks import count_graphs
from pipeline.backends.pytorch.inductor import explained
from pipeline.backends.pytorch.module import load_module, run_module, tensor_from_array
from pipeline.backends.pytorch.waits import cuda_syncs, find_waits
from pipeline.core.artifacts import ModelSource
from pipeline.core.progress import Progress, silent
from pipeline.core.shapes import Point, Profile, TensorSpec
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.results.module_findings import ModuleFindings

POINTS: tuple[Point, ...] = ("opt", "min", "max")


def examine_module(
    source: ModelSource,
    inputs: tuple[TensorSpec, ...],
    profiles: tuple[Profile, ...],
    compiles: bool,
    progress: Progress = silent,
) -> ModuleFindings:
    """Return what a run of the module shows, at opt of the first profile.

    `compiles`: also what torch.compile makes of it, at opt, min and max of every profile. The
    module runs on the device of the baselines. ModelError if it fails.
    """
    target, _ = usable_target()
    on_gpu = target.compute_capability is not None
    device = DEVICE if on_gpu else "cpu"
    module = load_module(source, device)
    feeds = [
        draw_feeds(inputs, profile.sizes(point), 0, profile.values_at(point))
        for profile in profiles or (Profile(),)
        for point in (POINTS if compiles else POINTS[:1])
    ]
    progress(None, "looking for calls that wait for the device")
    run_module(module, source, feeds[0], device)  # what the first run alone does counts as no wait
    args = [
        tuple(tensor_from_array(each[spec.name]).to(device) for spec in source.inputs)
        for each in feeds
    ]
    with explained("the module cannot be examined"):
        waits = find_waits(
            partial(module, *args[0]), source.python_path, cuda_syncs if on_gpu else nullcontext
        )
    graphs = None
    if compiles:
        progress(None, "counting the graphs of torch.compile")
        graphs = count_graphs(module, args, source.python_path)
    return ModuleFindings(waits=waits, graphs=graphs)
