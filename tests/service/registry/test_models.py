"""Stored values of promoted models."""

import pytest
from pydantic import ValidationError

from service.registry.models import DeploymentOptions, devices_from_text


@pytest.mark.parametrize(
    ("stored", "instances"),
    [
        ({"overlap": False}, None),
        ({"overlap": True}, 2),
        ({"instances": 3, "overlap": True}, 6),
        ({"instances": 3}, 3),
    ],
)
def test_options_of_an_earlier_build_are_read(
    stored: dict[str, object], instances: int | None
) -> None:
    assert DeploymentOptions.model_validate(stored) == DeploymentOptions(instances=instances)


@pytest.mark.parametrize("instances", [{"x": 1}, "2x", [1]])
def test_instances_that_are_no_number_are_refused(instances: object) -> None:
    with pytest.raises(ValidationError, match="instances"):
        DeploymentOptions.model_validate({"instances": instances, "overlap": True})


@pytest.mark.parametrize(
    ("given", "device", "names"),
    [
        (None, None, ("",)),
        ("all", "all", ("",)),
        ("gpu:1", "gpu:1", ("gpu:1",)),
        (["gpu:1", "gpu:0"], ("gpu:1", "gpu:0"), ("gpu:1", "gpu:0")),
        (["cpu"], ("cpu",), ("cpu",)),
    ],
)
def test_devices_are_one_several_or_all(
    given: object, device: object, names: tuple[str, ...]
) -> None:
    options = DeploymentOptions.model_validate({"device": given})
    assert (options.device, options.named_devices) == (device, names)
    assert DeploymentOptions.model_validate_json(options.model_dump_json()) == options


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ([], "expected at least one device, got an empty list"),
        (["gpu:0", "gpu:1", "gpu:0"], "'gpu:0' is in the list twice"),
        (["gpu:0", "all"], "`all` stands without a list"),
        ([1], "device"),
        (7, "device"),
    ],
)
def test_devices_that_cannot_be_are_refused(device: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DeploymentOptions.model_validate({"device": device})


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("all", "all"),
        (" gpu:0 ", "gpu:0"),
        ("gpu:0,gpu:1", ("gpu:0", "gpu:1")),
        ("gpu:0 , gpu:1", ("gpu:0", "gpu:1")),
        ("gpu:0,", ("gpu:0", "")),  # the server knows no device without a name
    ],
)
def test_a_text_names_devices(text: str, device: str | tuple[str, ...]) -> None:
    assert devices_from_text(text) == device
