"""How many nodes run, and where: without Ray."""

import pytest

from pipeline.plan.sections.targets import requirement_from
from service.cluster.scaling import (
    Decision,
    Limits,
    Place,
    bundle_for,
    bundle_of,
    decide,
    devices_of,
)

CPU = {"cpu": {"name": "a CPU", "threads": "8"}}
H200 = {"gpu:0": {"name": "NVIDIA H200"}, "gpu:1": {"name": "NVIDIA H200"}}
ONE, TWO = {"measure": 1}, {"measure": 2, "GPU": 2}
LIMITS = Limits(min_nodes=0, max_nodes=4, idle_s=60)


def cpu(name: str, runs: bool = False, jobs: int = 0, idle_s: float = 0.0) -> Place:
    return Place(name, CPU, ONE, runs, jobs, idle_s)


def gpu(name: str, runs: bool = False, jobs: int = 0) -> Place:
    return Place(name, H200, TWO, runs, jobs)


def test_a_waiting_job_starts_a_node_where_its_device_is() -> None:
    places = [cpu("a"), gpu("b")]
    assert decide({"gpu:H200": 1}, places, LIMITS) == Decision(("b",), (), (TWO,))
    assert decide({"cpu": 1}, places, LIMITS) == Decision(("a",), (), (ONE,))
    assert decide({}, places, LIMITS) == Decision()


def test_a_job_goes_to_a_free_device_before_another_node_starts() -> None:
    assert decide({"cpu": 1}, [cpu("a", runs=True), cpu("b")], LIMITS).start == ()
    assert decide({"cpu": 2}, [cpu("a", runs=True), cpu("b")], LIMITS).start == ("b",)
    assert decide({"cpu": 1}, [cpu("a", runs=True, jobs=1), cpu("b")], LIMITS).start == ("b",)
    assert decide({"gpu": 2}, [gpu("a"), gpu("b")], LIMITS).start == ("a",), "two devices"
    assert decide({"gpu": 3}, [gpu("a"), gpu("b")], LIMITS).start == ("a", "b")


def test_what_no_ray_node_has_is_requested_of_the_autoscaler() -> None:
    decision = decide({"gpu:H200": 1, "cpu": 1}, [cpu("a", runs=True)], LIMITS)
    assert decision == Decision((), (), (ONE, {"measure": 1, "GPU": 1}))
    assert decide({"not a device!": 3}, [], LIMITS) == Decision()


def test_the_greatest_number_of_nodes_is_kept() -> None:
    limits = Limits(0, 2, 60)
    decision = decide({"cpu": 9}, [cpu("a", runs=True, jobs=1), cpu("b"), cpu("c")], limits)
    assert decision == Decision(("b",), (), (ONE, ONE))
    assert decide({"cpu": 10**9}, [], limits).bundles == (ONE, ONE), "counted, not looped over"
    many = [cpu(name, runs=True, idle_s=1) for name in "abc"]
    assert decide({}, many, limits).stop == ("a",), "started with a greater --max"


def test_the_least_number_of_nodes_runs_without_jobs() -> None:
    limits = Limits(2, 4, 60)
    assert decide({}, [cpu("a")], limits) == Decision(("a",), (), (ONE, ONE))
    idle = [cpu(name, runs=True, idle_s=100) for name in "abc"]
    assert decide({}, idle, limits).stop == ("a",)


def test_idle_nodes_end_and_busy_ones_do_not() -> None:
    places = [
        cpu("busy", runs=True, jobs=1, idle_s=0),
        cpu("short", runs=True, idle_s=59),
        cpu("long", runs=True, idle_s=61),
    ]
    assert decide({}, places, LIMITS) == Decision((), ("long",), (ONE, ONE))
    needed = decide({"cpu": 2}, places, LIMITS)
    assert (needed.start, needed.stop) == ((), ()), "a job waits for it"


@pytest.mark.parametrize(
    ("resources", "devices"),
    [
        ({"CPU": 8}, ()),
        ({"measure": 1, "CPU": 8}, ("cpu",)),
        ({"measure": 1, "GPU": 2}, ("gpu:0",)),
        ({"measure": 2, "GPU": 2}, ("gpu:0", "gpu:1")),
        ({"measure": 3, "GPU": 2}, ("gpu:0", "gpu:1", "cpu")),
    ],
)
def test_measure_counts_the_devices_of_a_ray_node(
    resources: dict[str, float], devices: tuple[str, ...]
) -> None:
    assert devices_of(resources) == devices
    taken = bundle_of(devices)
    assert taken["measure"] == len(devices)
    assert taken.get("GPU", 0) == sum(device != "cpu" for device in devices)


def test_a_job_needs_one_device() -> None:
    assert bundle_for(requirement_from("cpu, avx512_vnni")) == ONE
    assert bundle_for(requirement_from("gpu:H200, tensorrt>=10.6")) == {"measure": 1, "GPU": 1}
