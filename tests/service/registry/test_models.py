"""Stored values of promoted models."""

import pytest

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
