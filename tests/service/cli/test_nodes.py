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


def test_a_plan_of_the_servers_own_may_have_targets(tmp_path: Path) -> None:
    configs = tmp_path / "configs"
    configs.mkdir()
    (configs / "code.py").write_text("build = None\n")
    (configs / "succeed.yaml").write_text(
        "targets: [cpu, 'gpu:H200']\nmodel: {entrypoint: code:build, python_path: .,"
        " weights_from: nowhere, inputs: [{name: x, dtype: float32, shape: [1]}]}\n"
    )
    with serving(tmp_path, configs=configs) as server:
        result = at(server, "submit", "--config", "succeed", "--wait")
        assert result.code == 1, result.err
        outcomes = {each["name"]: each["outcome"] for each in result.summary["targets"]}
        assert outcomes == {"cpu": "accepted", "gpu-H200": "unavailable"}
