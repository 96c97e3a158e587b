"""`crucible submit` with targets, and `crucible node list`."""

from pathlib import Path

from tests.service.builders.app import MODEL
from tests.service.cli.test_commands import at
from tests.service.integration.test_server import serving


def test_all_targets_are_followed_and_the_worst_decides(tmp_path: Path) -> None:
    model, plan = tmp_path / "model.onnx", tmp_path / "plan.yaml"
    model.write_bytes(MODEL)
    with serving(tmp_path) as server:
        plan.write_text("name: succeed\ntargets: [cpu, {name: mine, device: 'gpu:H200'}]")
        result = at(server, "submit", model, "--plan", plan, "--wait")
        assert result.code == 1, result.err
        outcomes = {each["name"]: each["outcome"] for each in result.summary["targets"]}
        assert outcomes == {"cpu": "accepted", "mine": "unavailable"}
        assert "mine: unavailable" in result.err
        assert "no server and no node has" in result.out

        plan.write_text("name: succeed\ntargets: [cpu]")
        assert at(server, "submit", model, "--plan", plan, "--wait", "--json").code == 0

        plan.write_text("name: hang\ntargets: [cpu]")
        result = at(server, "submit", model, "--plan", plan)
        assert (result.code, result.summary["outcome"]) == (0, None)
        assert f"{server.url}/compiles/{result.summary['id']}" in result.out

        listed = at(server, "node", "list", "--json").summary["nodes"]
        assert [(node["kind"], node["live"]) for node in listed] == [("server", True)]
        assert "(server)" in at(server, "node", "list").out
