"""Choose the devices on which an engine serves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.core.artifacts import Engine
from service.devices.gpus import GpuKind
from service.errors import Unprocessable


def device_for(device: str | None, on_gpu: bool, names: Sequence[str]) -> str:
    """Choose the device of an engine among `names`, by default the first that fits.

    Unprocessable if the engine cannot run on `device`, or on any.
    """
    fitting = [name for name in names if name.startswith("gpu:") == on_gpu]
    if device is None and fitting:
        return fitting[0]
    if device is None or device not in fitting:
        kind = "a GPU" if on_gpu else "a CPU"
        available = ", ".join(fitting) or "none"
        message = f"this server has no device for an engine that was built for {kind}"
        if device is not None:
            message = f"the engine was built for {kind} and does not run on device '{device}'"
        raise Unprocessable(
            f"{message}; devices that fit: {available}",
            "leave `device` out, or compile the model for a device of this server",
        )
    return device


def all_devices_for(
    engine: Engine, names: Sequence[str], kinds: Mapping[str, GpuKind]
) -> tuple[tuple[str, ...], str]:
    """Choose the GPUs among `names` that are of the kind for which an engine was built.

    Return them, and a note on those that are left out. Unprocessable if there is none.
    """
    gpus = {name: kinds[name] for name in names if name in kinds}
    fitting = tuple(name for name, kind in gpus.items() if _is_of_kind(kind, engine))
    others = "; ".join(f"{name} is {gpus[name]}" for name in gpus if name not in fitting)
    kind = GpuKind(engine.target.device, engine.target.compute_capability)
    if not fitting:
        raise Unprocessable(
            f"`all` devices: the engine was built for {kind}, and this server has no such GPU"
            f" ({others or 'it has no GPU'})",
            "compile the model for a GPU of this server",
        )
    return fitting, others and f"`all` leaves out, as the engine was built for {kind}: {others}"


def _is_of_kind(kind: GpuKind, engine: Engine) -> bool:
    """Return whether GPUs of a kind are what an engine was built for, and so run it as proved."""
    target = engine.target
    host = target.model_copy(update={"compute_capability": kind.compute_capability})
    # An engine for a compute capability was built for no GPU in particular.
    any_name = engine.recipe.compute_capability is not None
    return not target.accepts(host) and (any_name or target.device == kind.name)
