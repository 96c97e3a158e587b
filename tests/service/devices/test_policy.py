"""Leases: measuring is alone, builds are one at a time, nobody is overtaken, nothing is lost."""

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as some

from service.devices.policy import Devices, Lease, Use

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
HERE = Devices(("cpu", "gpu:0", "gpu:1"))


def lease(holder: str, use: Use, device: str = "cpu") -> Lease:
    return Lease(device, use, holder)


def grant_all(
    *leases: Lease, devices: Devices = HERE, patience_s: float = 0.0
) -> tuple[Devices, list[str]]:
    for lease in leases:
        devices = devices.ask(lease, NOW, patience_s)
    devices, grants = devices.grant(NOW)
    return devices, [grant.holder for grant in grants]


def test_one_build_at_a_time_on_each_device() -> None:
    devices, holders = grant_all(
        lease("a", "build"),
        lease("b", "build"),
        lease("c", "build", "gpu:0"),
        lease("d", "build", "gpu:1"),
    )
    assert holders == ["a", "c", "d"]
    devices, holders = grant_all(devices=devices.give_back("a", "cpu"))
    assert holders == ["b"]


def test_measuring_is_alone_and_is_not_overtaken() -> None:
    devices, holders = grant_all(lease("a", "build"), lease("m", "measure"), lease("b", "build"))
    assert holders == ["a"]
    devices, holders = grant_all(devices=devices.give_back("a", "cpu"))
    assert holders == ["m"]
    devices, holders = grant_all(devices=devices.give_back("m", "cpu"))
    assert holders == ["b"]


def test_a_job_goes_from_building_to_measuring_without_giving_the_device_away() -> None:
    devices, _ = grant_all(lease("a", "build"), lease("b", "build"))
    first = devices.waiting[0]
    assert first.lease.holder == "b"
    devices = Devices(devices.names, devices.held, ()).ask(lease("a", "measure"), NOW)
    devices, holders = grant_all(devices=devices)
    assert holders == ["a"]


def test_measuring_beside_engines_that_serve_waits_and_is_then_contended() -> None:
    devices, holders = grant_all(
        lease("m", "measure"), devices=HERE.serve("s", "cpu"), patience_s=10
    )
    assert holders == []
    assert devices.next_time() == NOW + dt.timedelta(seconds=10)
    assert devices.grant(NOW + dt.timedelta(seconds=9))[1] == ()
    (late,) = devices.grant(NOW + dt.timedelta(seconds=10))[1]
    assert late.contended
    (alone,) = devices.give_back("s", "cpu").grant(NOW)[1]
    assert not alone.contended


def test_serving_waits_for_nobody_and_what_is_measured_beside_it_is_contended() -> None:
    devices, holders = grant_all(
        lease("a", "build"), lease("m", "measure", "gpu:0"), lease("n", "measure", "gpu:1")
    )
    assert holders == ["a", "m", "n"]
    held = devices.serve("s", "gpu:0").serve("s", "cpu").held
    assert {lease.holder: lease.contended for lease in held} == {
        "a": False,
        "m": True,
        "n": False,
        "s": False,
    }
    assert [lease.use for lease in held if lease.device == "gpu:0"] == ["measure", "serve"]


def test_a_wish_is_taken_back_too_and_an_unknown_device_is_an_error() -> None:
    devices, _ = grant_all(lease("a", "build"), lease("b", "build"))
    assert devices.give_back("b", "cpu").waiting == ()
    assert devices.give_back("nobody", "cpu") == devices
    with pytest.raises(KeyError):
        HERE.ask(lease("a", "build", "gpu:7"), NOW)
    with pytest.raises(KeyError):
        HERE.serve("a", "gpu:7")


@given(
    some.lists(
        some.tuples(
            some.sampled_from("abcdef"), some.sampled_from(["build", "serve", "measure", "back"])
        ),
        max_size=40,
    )
)
def test_whatever_comes_measuring_is_alone_and_nothing_is_lost(
    moves: list[tuple[str, str]],
) -> None:
    devices = HERE
    for number, (holder, move) in enumerate(moves):
        name = f"{holder}{number if move != 'back' else ''}"
        if move == "back":
            for lease in devices.held[:1]:
                devices = devices.give_back(lease.holder, "cpu")
        elif move == "serve":
            devices = devices.serve(name, "cpu")
        else:
            lease = Lease("cpu", move, name)  # type: ignore[arg-type]
            devices = devices.ask(lease, NOW, patience_s=1e9)
        devices, _ = devices.grant(NOW)
        uses = [lease.use for lease in devices.held]
        assert uses.count("build") <= 1
        alone = [lease for lease in devices.held if lease.use == "measure" and not lease.contended]
        assert not alone or len(uses) == 1
        assert uses.count("measure") <= 1
    for _ in range(len(moves) + 1):
        for lease in devices.held:
            devices = devices.give_back(lease.holder, "cpu")
        devices, _ = devices.grant(NOW)
    assert devices.waiting == ()
