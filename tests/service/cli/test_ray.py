"""`crucible ray`: what keeps it from starting."""

import socket
import sys
from pathlib import Path

import pytest

from pipeline.errors import BackendUnavailable, HostError, PlanError
from service.cli.ray import selector_from
from service.cluster.operations import check_requirements
from service.cluster.ray_cluster import connect
from service.settings import Settings
from tests.builders.cli import crucible
from tests.service.cluster.ray_cluster import missing

DATABASE = "postgresql+psycopg://nobody@127.0.0.1/nothing"


def test_a_supervisor_needs_the_database_of_the_servers() -> None:
    result = crucible("ray", "start")
    assert (result.code, "set CRUCIBLE_SERVICE_DATABASE_URL here" in result.err) == (1, True)


def test_the_least_number_of_nodes_is_at_most_the_greatest() -> None:
    result = crucible("ray", "start", "--min", "3", "--max", "2")
    assert (result.code, "--min to be at most --max, got 3 and 2" in result.err) == (1, True)


def test_the_labels_of_ray_nodes() -> None:
    assert selector_from("pool=crucible, ray.io/zone=a") == {"pool": "crucible", "ray.io/zone": "a"}
    assert selector_from("") == {}
    for wrong in ("pool", "=a", "pool=", "pool==a"):
        with pytest.raises(PlanError, match=f"expected --select as .* got '{wrong}'"):
            selector_from(wrong)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for call in (
        lambda: check_requirements(Settings(home=tmp_path, database_url=DATABASE)),
        lambda: connect("auto"),
    ):
        with pytest.raises(BackendUnavailable, match="Ray is not installed") as refused:
            call()
        assert ".[ray]" in refused.value.next_step


@pytest.mark.skipif(bool(missing()), reason=f"Ray test: {missing()}")
@pytest.mark.parametrize("port", ["", "not a port"])
def test_without_a_cluster_the_address_is_named(port: str) -> None:
    with socket.socket() as bound:  # nobody listens there
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{port or bound.getsockname()[1]}"
        with pytest.raises(HostError, match=f"no Ray cluster answers at '{address}'") as refused:
            connect(address)
    assert "HOST:PORT of its head" in refused.value.next_step
