"""Models from the command line and by the client, on a real server with real engines; and over its
death.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import httpx
import numpy as np
import pytest

from pipeline.plan.schema import ModelConfig, Plan
from service.cli.models import print_model
from service.client import Client, RemoteError
from service.jobs.store import JobStore
from service.registry.models import DeploymentOptions, DeploymentView, ModelView
from service.storage.database import Database
from service.storage.layout import Folders
from service.submission.recompile import MIN_REQUESTS
from tests.builders.cli import Result, crucible
from tests.service.builders.serving import on_two_gpus
from tests.service.integration.test_server import Server, serving, until
from tests.service.registry.test_repository import version
from tests.service.serving.engines import linear, processes_of
from tests.service.serving.models import ended_job


def reports(home: Path, *layers: int) -> list[str]:
    """Jobs that have ended with an engine, in a home without a server."""
    database = Database(home / "crucible.db")
    try:
        return [
            ended_job(
                Folders(home), JobStore(database), engine=linear(home / "engines", layers=layer)
            )
            for layer in layers
        ]
    finally:
        database.close()


def at(server: Server, *arguments: str) -> Result:
    return crucible(*arguments, env={"CRUCIBLE_URL": server.url, "CRUCIBLE_KEY": ""})


def test_a_model_is_promoted_loaded_rolled_back_and_unloaded_by_commands(tmp_path: Path) -> None:
    first, second = reports(tmp_path, 1, 2)
    with serving(tmp_path) as server:
        result = at(server, "promote", "m", first)
        assert (
            result.out
            == "model m: version 1 (onnxruntime fp32) is current, the model is unloaded\n"
        ), result.err
        options = ("--max-delay-ms", "1", "--instances", "2", "--device", "all")
        assert at(server, "load", "m", *options).out.endswith(
            "is current, version 1 answers on cpu\n"
        )
        promoted = at(server, "promote", "m", f"{server.url}/reports/{second}", "--json").summary
        assert (promoted["current"]["version"], promoted["deployment"]["version"]) == (2, 2)
        options = promoted["deployment"]["options"]
        assert (options["max_delay_s"], options["instances"], options["device"]) == (
            0.001,
            2,
            "all",
        )
        assert [
            word for word in ("m", "2", "ready", "cpu") if word in at(server, "models").out.split()
        ] == ["m", "2", "ready", "cpu"]
        assert "2 (current)" in at(server, "models", "m").out
        assert json.loads(at(server, "models", "m", "--json").out) == promoted
        assert "version 1 answers on cpu" in at(server, "rollback", "m").out
        assert at(server, "unload", "m").out == "model m is unloaded\n"

        for arguments, message in (
            (("rollback", "m"), "version 1 of 'm' was the first"),
            (
                ("load", "m", "--instances", "0"),
                "instances: Input should be greater than or equal to 1",
            ),
            (("load", "m", "--device", "cpu,cpu"), "'cpu' is in the list twice"),
            (("load", "m", "--device", "cpu,gpu:0"), "does not run on device 'gpu:0'"),
            (("promote", "m", "no job"), "neither a job's id nor an address"),
        ):
            refused = at(server, *arguments)
            assert (refused.code, message in refused.err) == (1, True), refused.err


def test_a_model_is_measured_again_and_the_job_followed(tmp_path: Path) -> None:
    (job,) = reports(tmp_path, 1)
    does(tmp_path, job, "succeed")
    with serving(tmp_path) as server, Client(server.url) as client:
        client.promote("m", job)
        result = at(server, "benchmark", "m")
        assert result.code == 0, result.err
        assert (result.summary["state"], result.summary["measures"]) == (
            "succeeded",
            {"model": "m", "version": 1},
        )
        assert [line.split()[0] for line in result.err.splitlines()] == [
            "queued",
            "running",
            "done",
            "succeeded",
        ]
        assert [
            word
            for word in ("samples/s", "pytorch eager fp32", "ACCEPTED", "/reports/")
            if word not in result.out
        ] == []
        assert len(at(server, "benchmark", "m", "--version", "1", "--json").out.splitlines()) == 1
        assert "benchmark of m 1" in at(server, "jobs").out
        assert (
            client.benchmark("m", idempotency_key="a").id
            == client.benchmark("m", idempotency_key="a").id
        )
        for arguments, message in (
            (("n",), "no model 'n'"),
            (("m", "--version", "2"), "no version 2"),
            (("m", "--version", "0"), "--version"),
        ):
            refused = at(server, "benchmark", *arguments)
            assert (refused.code, message in refused.err) == (1, True), refused.err

        does(tmp_path, job, "fail")
        failed = at(server, "benchmark", "m")
        assert (failed.code, failed.summary["state"], "no such model" in failed.err) == (
            1,
            "failed",
            True,
        )


def test_traffic_is_shown_and_a_model_compiled_again_for_it(tmp_path: Path) -> None:
    (job,) = reports(tmp_path, 1)
    does(tmp_path, job, "succeed")
    (Folders(tmp_path).uploads(job) / "model.onnx").write_bytes(b"onnx")
    traffic = ("recompile", "m", "--from-traffic")
    with serving(tmp_path) as server, Client(server.url) as client:
        client.promote("m", job)
        client.load("m")
        assert "has answered 0 requests" in at(server, *traffic).err
        for rows in (1, 16):
            body = np.ones((rows, 8), np.float32).tobytes()
            for _ in range(MIN_REQUESTS):
                client.infer(body, "application/octet-stream")
        table = at(server, "shapes", "m").out
        assert re.search(r"batch 16 +│ 100 +│ 50.0% +│ 100 +│ 0.0%", table), table
        suggested = "from traffic: {batch: [1, 1, 1]}, {batch: [1, 16, 16]}; a run is 0.00"
        assert suggested in table
        assert json.loads(at(server, "shapes", "m", "--json").out)["answered"] == 2 * MIN_REQUESTS

        dry = at(server, *traffic, "--dry-run")
        assert (dry.code, suggested in dry.out, len(client.jobs().jobs)) == (0, True, 1)
        assert at(server, *traffic, "--dry-run", "--json").summary["job"] is None
        result = at(server, *traffic, "--wait")
        assert (result.code, suggested in result.out) == (0, True), result.err
        assert f"`crucible promote m {result.summary['id']}`" in result.out
        assert result.summary["recompiles"] == {"model": "m", "version": 1}
        assert "recompile of m 1" in at(server, "jobs").out
        assert "when it has succeeded, make it" in at(server, *traffic).out
        for arguments, message in (
            (("recompile", "m"), "expected --from-traffic"),
            (("recompile", "n", "--from-traffic"), "no model 'n'"),
            (("shapes", "n"), "no model 'n' is deployed"),
        ):
            refused = at(server, *arguments)
            assert (refused.code, message in refused.err) == (1, True), refused.err


def does(home: Path, job: str, name: str) -> None:
    """What the double does when it is to measure what this job made."""
    folders = Folders(home)
    folders.save_plan(
        job, Plan(name=name, model=ModelConfig(path=folders.uploads(job) / "model.onnx"))
    )


def test_the_client_says_the_same(tmp_path: Path) -> None:
    (job,) = reports(tmp_path, 1)
    with serving(tmp_path) as server, Client(server.url) as client:
        assert client.models().models == ()
        assert client.promote("m", job).current.job == job
        view = client.load("m", DeploymentOptions(instances=2))
        assert (view.deployment.state, view.deployment.version) == ("ready", 1)
        assert client.models().models == (client.model("m"),) == (view,)
        assert client.shapes("m").shapes == ()
        client.unload("m")
        assert client.model("m").deployment.state == "unloaded"
        with pytest.raises(RemoteError, match="was the first") as error:
            client.rollback("m")
        assert (error.value.status, error.value.code) == (409, "service.conflict")


def test_a_killed_server_leaves_no_process_and_reloads_its_deployments(tmp_path: Path) -> None:
    (job,) = reports(tmp_path, 1)
    name = f"killed{os.getpid()}"  # tests may run twice on one machine
    with serving(tmp_path) as server, Client(server.url) as client:
        client.promote(name, job)
        client.promote("unloaded", job)
        client.load(name)
        assert processes_of(f"serve-{name}-")
        server.process.kill()
        server.process.wait()
    until(lambda: processes_of(f"serve-{name}-") == [])
    with serving(tmp_path) as server, Client(server.url) as client:  # ready only with the model
        assert (
            client.model(name).deployment.version,
            client.model("unloaded").deployment.version,
        ) == (1, None)
        assert 'state="ready"' in httpx.get(f"{server.url}/metrics").text
        assert server.end() == 0
    assert processes_of(f"serve-{name}-") == []


def test_a_device_that_does_not_answer_and_what_is_left_out_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    served = on_two_gpus()
    deployment = DeploymentView(
        state="ready",
        version=1,
        device=served.device,
        devices=served.devices,
        note="`all` leaves out gpu:1",
        options=None,
    )
    current = version()
    view = ModelView(
        name="m", owner="local", current=current, versions=(current,), deployment=deployment
    )
    print_model(view, as_json=False)
    _, *lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["gpu:3 is failed: its worker <b>died</b>", "`all` leaves out gpu:1"]
