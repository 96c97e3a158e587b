"""Stored values of promoted models."""

import pytest
from pydantic import ValidationError

from service.registry.models import DeploymentOptions


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
