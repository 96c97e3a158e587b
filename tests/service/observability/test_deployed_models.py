"""The metrics of deployed models, for each of their devices."""

from prometheus_client import CollectorRegistry, generate_latest

from service.observability.deployed_models import Models
from tests.service.builders.serving import on_two_gpus


def test_each_device_of_a_model_has_its_state_and_its_instances() -> None:
    registry = CollectorRegistry()
    registry.register(Models(lambda: (on_two_gpus(),)))
    text = generate_latest(registry).decode()
    for device, state in (("gpu:0", "ready"), ("gpu:3", "failed")):
        labels = f'device="{device}",model="wide"'
        assert f'crucible_model_state{{{labels},state="{state}",version="1"}} 1.0' in text
        assert f'crucible_model_instances{{{labels},version="1"}} 2.0' in text
