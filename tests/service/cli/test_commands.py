"""The service's commands as a user runs them, beside and against a real server with a double for
the job worker.
"""

import io
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import httpx
import numpy as np
import pytest
from rich.console import Console

from pipeline.cli.stage_progress import StageProgress
from pipeline.report.bundle import load_engine
from pipeline.report.files import JSON_NAME
from service.cli.progress import figures_of, stage_of
from service.client import Client, Event, RemoteError, Upload
from service.storage.layout import Folders
from tests.builders.cli import Result, crucible
from tests.pipeline.execution.figures import candidate, latency
from tests.service.builders.app import MODEL
from tests.service.builders.jobs import write_out
from tests.service.builders.serving import serving_models
from tests.service.integration.test_server import Server, serving
from tests.service.test_client import upload

NOBODY = "http://127.0.0.1:9"
DIGITS = str(Path(__file__).parents[3] / "configs" / "digits.yaml")


def at(server: Server, *arguments: str | Path, key: str = "") -> Result:
    return crucible(*arguments, env={"CRUCIBLE_URL": server.url, "CRUCIBLE_KEY": key})


def submit(server: Server, folder: Path, name: str, *arguments: str) -> Result:
    sent = upload(folder, name)
    assert sent.plan is not None
    return at(server, "submit", sent.model, "--plan", sent.plan, *arguments)


def test_keys_are_made_and_revoked_beside_a_running_server(tmp_path: Path) -> None:
    def status(key: str) -> int:
        return httpx.get(
            f"{server.url}/jobs", headers={"Authorization": f"Bearer {key}"}
        ).status_code

    home = ("--home", tmp_path)
    with serving(tmp_path, keys_required=True) as server:
        result = crucible(
            "keys",
            "create",
            "--name",
            "ci",
            "--scope",
            "compile",
            "--scope",
            "infer",
            "--owner",
            "team",
            *home,
        )
        key = result.out.strip()
        prefix = key.split("_")[1]
        assert result.err.splitlines() == [
            f"key {prefix} (compile, infer) of team; keep it, it is not shown again"
        ]
        assert status(key) == 200
        listed = crucible("keys", "list", "--json", *home)
        assert [
            (entry["prefix"], entry["name"], entry["revoked"]) for entry in json.loads(listed.out)
        ] == [(prefix, "ci", None)]
        assert prefix in crucible("keys", "list", *home).out
        assert key not in crucible("keys", "list", *home).out
        assert at(server, "jobs", "--json", key=key).summary == {"jobs": [], "next": None}
        assert crucible("keys", "revoke", prefix, *home).out == f"key {prefix} ('ci') is revoked\n"
        assert status(key) == 401

        refused = at(server, "jobs", key=key)
        assert (refused.code, refused.out) == (1, "")
        assert "this key is not known, or was revoked" in refused.err
        without = at(server, "jobs")
        assert (without.code, "this service needs a key" in without.err) == (1, True)
    for wrong in (("create", "--name", "x", "--scope", "root"), ("revoke", prefix)):
        refusal = crucible("keys", *wrong, *home)
        assert (refusal.code, "bug" in refusal.err) == (1, False), refusal.err


def test_a_container_gets_its_first_admin_key_by_file(tmp_path: Path) -> None:
    key = f"cru_{'a' * 10}_{'B' * 43}"
    (tmp_path / "admin.key").write_text(f"{key}\n")
    for _ in range(2):  # also at a restart
        with serving(tmp_path, keys_required=True, admin_key_file=tmp_path / "admin.key") as server:
            assert at(server, "jobs", "--json", key=key).code == 0
            assert at(server, "jobs", "--json").code == 1
            assert key not in server.log()


def test_a_model_is_sent_followed_and_its_report_read(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        result = submit(server, tmp_path, "succeed", "--wait")
        assert result.code == 0, result.err
        job = result.summary
        assert (job["state"], job["verdict"]) == ("succeeded", "accepted")
        assert [line.split()[0] for line in result.err.splitlines()] == [
            "queued",
            "running",
            "done",
            "succeeded",
        ]
        report = f"{server.url}/reports/{job['id']}"
        assert "ACCEPTED" in result.out
        assert f"report: {report}" in result.out

        quiet = at(server, "wait", str(job["id"]), "--json")
        assert (quiet.code, quiet.err, len(quiet.out.splitlines()), quiet.summary) == (
            0,
            "",
            1,
            job,
        )
        by_id, by_address = (
            at(server, "report", str(job["id"])),
            crucible("report", report, env={"CRUCIBLE_URL": NOBODY}),
        )
        assert by_id.out == by_address.out
        assert by_id.out.endswith(f"report: {report}\n")
        written = json.loads((tmp_path / "template" / JSON_NAME).read_text())
        assert at(server, "report", str(job["id"]), "--json").summary["winner"] == written["winner"]
        assert "succeed" in at(server, "jobs", "--state", "succeeded").out
        shown = at(server, "limits", "--json").summary
        limits = {row["setting"]: (row["used"], row["limit"]) for row in shown["limits"]}
        assert limits["max_queued"] == (0, 1000)
        assert limits["max_stored_bytes"][0] > 0
        assert "max_requests_per_s" in at(server, "limits").out


def test_what_fails_or_is_cancelled_ends_with_1(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        failed = submit(server, tmp_path, "fail", "--wait")
        assert (failed.code, failed.summary["state"]) == (1, "failed")
        assert "no such model" in failed.err
        assert "send another" in failed.err
        report = at(server, "report", str(failed.summary["id"]))
        assert (report.code, "there is no report" in report.err) == (1, True)

        sent = submit(server, tmp_path, "hang")
        job = str(sent.summary["id"])
        assert f"crucible wait {server.url}/jobs/{job}" in sent.out
        assert at(server, "cancel", job).out in (
            f"job {job} is cancelling\n",
            f"job {job} is cancelled\n",
        )
        waited = at(server, "wait", f"{server.url}/jobs/{job}")
        assert (waited.code, waited.summary["state"], f"job {job} was cancelled" in waited.err) == (
            1,
            "cancelled",
            True,
        )
        assert at(server, "cancel", job).code == 1


def test_a_failed_job_is_tried_again_and_a_model_alone_is_sent_with_its_range(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as server:
        failed = ended(server, upload(tmp_path, "fail"))
        again = at(server, "retry", failed, "--wait")
        assert (again.code, again.summary["state"], again.summary["id"] != failed) == (
            1,
            "failed",
            True,
        )
        (tmp_path / "succeed.onnx").write_bytes(MODEL)
        sent = at(
            server,
            "submit",
            tmp_path / "succeed.onnx",
            "--profile",
            "batch=1:8:64",
            "--profile",
            "length=16",
            "--wait",
        )
        assert (sent.code, sent.summary["name"]) == (0, "succeed"), sent.err
        plan = Folders(tmp_path).load_plan(str(sent.summary["id"]))
        assert {
            name: (size.min, size.opt, size.max) for name, size in plan.profiles[0].dims.items()
        } == {"batch": (1, 8, 64), "length": (16, 16, 16)}


def test_what_a_job_made_is_fetched_as_compile_leaves_it(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        job, place = ended(server, upload(tmp_path, "succeed")), tmp_path / "mine"
        result = at(server, "download", job, "--out", place)
        assert (result.code, result.summary) == (
            0,
            {"folder": str(place), "engine": str(place / "engine")},
        ), result.err
        with Client(server.url) as client:
            client.download(job, place)  # again, over what is there
            failed = ended(server, upload(tmp_path, "fail"))
            with pytest.raises(RemoteError, match="there is no report"):
                client.download(failed, tmp_path / "none")
        assert {path.name for path in place.iterdir()} == {
            "engine",
            "report.html",
            "report.json",
            "report.md",
        }
        assert not (tmp_path / "none").exists()
        published = Folders(tmp_path).report(job)
        paths = [path for path in published.rglob("*") if path.is_file()]
        ignored = ("engine.json", "sha256.json")
        files = [path.relative_to(published) for path in paths if path.name not in ignored]
        assert [(place / file).read_bytes() for file in files] == [
            (published / file).read_bytes() for file in files
        ]
        assert load_engine(place).digest == load_engine(published).digest
        (tmp_path / "taken").touch()
        assert "is a file" in at(server, "download", job, "--out", tmp_path / "taken").err


def ended(server: Server, sent: Upload) -> str:
    """The id of a job that has run to its end."""
    with Client(server.url) as client:
        job = client.submit(sent)
        assert list(client.events(job.id))
    return job.id


def test_what_is_rejected_ends_with_2(tmp_path: Path) -> None:
    report = write_out(tmp_path / "template", tmp_path / "template-store").model_copy(
        update={"verdict": "rejected", "winner": None, "ratio": None}
    )
    (tmp_path / "template" / JSON_NAME).write_text(report.model_dump_json())
    shutil.rmtree(tmp_path / "template" / "engine")
    with serving(tmp_path) as server:
        result = submit(server, tmp_path, "succeed", "--wait")
        assert (result.code, result.summary["verdict"], "REJECTED" in result.out) == (
            2,
            "rejected",
            True,
        )
        got = at(server, "download", str(result.summary["id"]), "--out", tmp_path / "out")
        assert (got.code, got.summary["engine"], (tmp_path / "out" / "report.md").is_file()) == (
            0,
            None,
            True,
        )


def test_what_a_stage_is_called_is_no_markup() -> None:
    data = {
        "at": "",
        "stage": "[/red]",
        "subject": "[/b]",
        "state": "finished",
        "seconds": 1.0,
        "fraction": None,
        "text": "",
        "new": 1,
    }
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as shown:
        StageProgress(console)(stage_of(Event(1, "stage", data)))
    assert shown.get() == "  done       1.0 s  [/red] [/b]\n"


def test_figures_of_an_unknown_form_are_left_out() -> None:
    console = Console(file=io.StringIO(), width=100)
    measured = asdict(candidate("[/b]", latency=latency(0.002)))
    with console.capture() as shown:
        for data in (measured, {**measured, "newer": 1}, {}):
            StageProgress(console)(figures_of(Event(1, "figures", data)))
    assert shown.get() == "  timing             [/b]: first runs 2 ms\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("submit",), "expected a model"),
        (("submit", "m.onnx", "--config", "digits"), "expected a model"),
        (("submit", "absent.onnx"), "cannot read 'absent.onnx'"),
        (
            ("submit", "m.onnx", "--profile", "batch"),
            "expected --profile DIM=MIN:OPT:MAX, got 'batch'",
        ),
        (
            ("submit", "m.onnx", "--plan", "p.yaml", "--profile", "batch=1"),
            "expected --profile or a plan, got both",
        ),
        (("submit", "--config", "digits", "--profile", "batch=1"), "expected a model"),
        (("jobs", "--state", "lost"), "no state 'lost'"),
        (("jobs", "--url", "example"), "expected the address of a service, got 'example'"),
        (("wait", "../x"), "neither a job's id nor an address"),
        (("wait", "01931f3a5b2c07d1e9a44c6f2", "--url", NOBODY), f"no answer from {NOBODY}"),
        (("report", "absent"), "no report at 'absent'"),
        (("keys",), "Missing command"),
    ],
)
def test_what_is_asked_wrongly_is_told_with_a_next_step(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    result = crucible(*arguments, cwd=tmp_path)
    assert (result.code, result.out) == (1, "")
    assert message in result.err
    assert "\nnext " in result.err


def test_a_key_is_never_told(tmp_path: Path) -> None:
    result = crucible("jobs", env={"CRUCIBLE_KEY": "cru_hunter2"})
    assert (result.code, "not a Crucible key" in result.err, "hunter2" in result.err) == (
        1,
        True,
        False,
    )


def test_a_model_is_asked_with_a_file(tmp_path: Path) -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.savez(tmp_path / "x.npz", a=x, b=x)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "x.json").write_text(json.dumps({"inputs": {"a": x.tolist(), "b": x.tolist()}}))
    with serving_models(tmp_path) as server:
        result = at(
            server, "infer", tmp_path / "x.npz", "--model", "add", "--out", tmp_path / "y.npz"
        )
        assert result.code == 0, result.err
        assert (
            "add version 2 on cpu: queue 1.000 ms, copy in 2.000 ms, compute 3.000 ms, copy out"
            " 4.000 ms; batch of 2" in result.out
        )
        assert sorted(np.load(tmp_path / "y.npz")) == ["difference", "sum"]
        np.testing.assert_array_equal(np.load(tmp_path / "y.npz")["sum"], 2 * x)
        result = at(
            server, "infer", tmp_path / "x.json", "--model", "add", "--output", "sum", "--json"
        )
        assert result.summary["outputs"] == {"sum": (2 * x).tolist()}
        for arguments, message in (
            ((tmp_path / "x.npy",), "several models are deployed: add, broken"),
            ((tmp_path / "x.npy", "--model", "add"), "a .npy file can be one input"),
            ((tmp_path / "y.npy", "--model", "add"), "cannot read"),
            ((tmp_path / "server.log", "--model", "add"), "unknown file suffix"),
        ):
            refused = at(server, "infer", *arguments)
            assert (refused.code, message in refused.err) == (1, True), refused.err


@pytest.mark.parametrize(
    ("arguments", "next_step"),
    [
        (("infer", "mine", "x.npy"), "see `crucible infer --help`"),
        (("keys", "create"), "see `crucible keys create --help`"),
        (("nonsense",), "see `crucible --help`"),
        (("submit", DIGITS), f"`crucible onnx {DIGITS} --out model.onnx` writes its model"),
        (("submit", "absent.yaml"), "give the path of a YAML plan or of an .onnx model"),
    ],
)
def test_wrong_arguments_name_the_help_of_their_command(
    arguments: tuple[str, ...], next_step: str
) -> None:
    result = crucible(*arguments)
    assert result.code == 1
    assert f"next {next_step}" in result.err
