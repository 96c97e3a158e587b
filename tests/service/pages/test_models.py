"""The pages of models, over HTTP. Deployments are doubles that answer at once."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.results.report import Verdict
from service.auth import LOCAL
from service.observability.live_figures import Counts, figures_between
from service.pages.forms.deployment import HELP
from service.pages.jobs import model_name
from service.pages.models import live
from service.pages.rendering import fragment
from service.registry.models import NAME, DeploymentOptions, DeploymentView, PromoteRequest
from service.serving.loader import Loader
from service.serving.models.switch import VersionSwitch
from service.storage.key import Scope
from tests.service.builders.app import Desk, at_desk
from tests.service.builders.serving import on_two_gpus
from tests.service.pages.test_pages import HOSTILE, Scripts, csrf_of, signed_in
from tests.service.serving.models import Host, ended_job

SCOPES_WITHOUT_CHANGES: tuple[Scope, ...] = ("compile", "infer")


def with_doubles(desk: Desk) -> Host:
    """Replace what loads engines and proves batches."""
    host, manager = Host(), desk.service.models
    private: Any = manager
    private._context = replace(private._context, start=host.start, prove=host.prove)
    private._loader = Loader(private._context)
    private._versions = VersionSwitch(
        private._table, private._loader, private._context, private._disk
    )
    return host


def report(desk: Desk, verdict: Verdict = "accepted", owner: str = "local") -> str:
    return ended_job(desk.service.folders, desk.service.jobs, verdict, owner)


async def promoted(desk: Desk, owner: str = "local", name: str = "m") -> str:
    """A job of this owner whose engine is the next version of a model."""
    job = report(desk, owner=owner)
    await desk.service.models.promote(LOCAL, name, PromoteRequest(report=job))
    return job


def test_a_model_from_its_result_to_its_end(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        with_doubles(desk)
        web = desk.client
        empty = await web.get("/ui/models")
        assert "No model yet." in empty.text
        jobs = [report(desk), report(desk)]
        for number, job in enumerate(jobs, 1):
            assert 'name="name" value="m"' in (await web.get(f"/ui/jobs/{job}")).text
            answer = await web.post(f"/ui/jobs/{job}/promote", data={"name": "net"})
            assert answer.headers["Location"] == "/ui/models/net"
            assert f"net, version {number}" in (await web.get(f"/ui/jobs/{job}")).text
        assert 'href="/ui/models/net"' in (await web.get("/ui/models")).text
        page = (await web.get("/ui/models/net")).text
        assert all(f"/ui/jobs/{job}" in page for job in jobs)
        assert "Roll back to version 1" in page
        assert "unloaded" in page
        assert "hx-sse:connect" not in page
        assert "is unloaded" in (await web.get("/ui/models/net/try")).text

        assert (await web.post("/ui/models/net/load")).status_code == 303
        assert "version 2 on cpu" in (page := (await web.get("/ui/models/net")).text)
        assert "hx-sse:connect" in page
        assert "7.34 MB" in page, "the memory of an instance"
        assert (await web.post("/ui/models/net/rollback")).status_code == 303
        page = (await web.get("/ui/models/net")).text
        assert "version 1 on cpu" in page
        assert "Roll back" not in page
        again = await web.post("/ui/models/net/rollback")
        assert again.status_code == 409
        assert "was the first" in again.text
        assert (await web.post("/ui/models/net/unload")).status_code == 303
        assert ">Load<" in (await web.get("/ui/models/net")).text

    at_desk(tmp_path, story)


def test_an_unproven_report_needs_consent_and_the_name_must_be_valid(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        with_doubles(desk)
        path = f"/ui/jobs/{report(desk, 'unproven')}/promote"
        for data, status in (
            ({"name": "m"}, 409),
            ({"name": HOSTILE}, 422),
            ({"name": "stats"}, 422),
            ({}, 422),
            ({"name": "m", "override": "true"}, 303),
        ):
            answer = await desk.client.post(path, data=data)
            assert answer.status_code == status, answer.text
            assert HOSTILE not in answer.text

    at_desk(tmp_path, story)


def test_the_form_of_a_deployment_keeps_what_was_wrong(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        with_doubles(desk)
        await promoted(desk)
        path = "/ui/models/m/deployment"
        data = {"instances": "65", "max_delay_s": HOSTILE, "queue_limit": "9"}
        wrong = await desk.client.post(path, data=data)
        assert wrong.status_code == 422
        assert "less than or equal to 64" in wrong.text
        assert wrong.text.count('aria-invalid="true"') == 2
        assert 'value="65"' in wrong.text
        assert 'value="9"' in wrong.text
        assert Scripts(wrong.text).found == []
        refused = await desk.client.post(path, data={"max_batch": "9"})
        assert refused.status_code == 422
        assert "takes at most 8" in refused.text.replace("\n", " ")
        for device in ("gpu:0", "cpu, gpu:0", "cpu, cpu"):
            refused = await desk.client.post(path, data={"device": device})
            assert refused.status_code == 422
            assert f'value="{device}"' in refused.text
        done = await desk.client.post(path, data={"instances": "2", "queue_limit": "9"})
        assert done.status_code == 303
        view = await desk.service.models.view(LOCAL, "m")
        assert view.deployment.options == DeploymentOptions(instances=2, queue_limit=9)
        assert 'value="9"' in (await desk.client.get("/ui/models/m")).text

    at_desk(tmp_path, story)


def test_the_form_has_every_option() -> None:
    assert HELP.keys() == DeploymentOptions.model_fields.keys()


def test_a_key_sees_only_the_buttons_that_it_may_press(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        with_doubles(desk)
        keys = {
            scope: desk.service.keys.create("page", (scope,), owner="ann")[1]
            for scope in SCOPES_WITHOUT_CHANGES
        }
        await desk.client.post("/ui/sign-in", data={"key": keys["compile"]})
        jobs = [await promoted(desk, "ann") for _ in range(2)]
        await desk.service.models.deploy(LOCAL, "m", DeploymentOptions())
        page = (await desk.client.get("/ui/models/m")).text
        assert "version 2 on cpu" in page
        for word in ("Unload", "Roll back", "Try it", "Deployment</h2>"):
            assert word not in page
        assert "Promote as" not in (await desk.client.get(f"/ui/jobs/{jobs[0]}")).text
        data = {"csrf": csrf_of(page), "name": "m"}
        for path in ("load", "unload", "rollback", "deployment", "try"):
            refused = await desk.client.post(f"/ui/models/m/{path}", data=data)
            assert (path, refused.status_code) == (path, 403)
            assert "has no scope" in refused.text
        refused = await desk.client.post(f"/ui/jobs/{jobs[0]}/promote", data=data)
        assert refused.status_code == 403
        assert (await desk.client.get("/ui/models/m/try")).status_code == 403
        await desk.client.post("/ui/sign-in", data={"key": keys["infer"]})
        assert "Try it" in (await desk.client.get("/ui/models/m")).text

    at_desk(tmp_path, story, keys_required=True)


def test_changes_need_the_token_of_the_session(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        with_doubles(desk)
        await signed_in(desk, "admin")
        job = await promoted(desk)
        await desk.service.models.deploy(LOCAL, "m", DeploymentOptions())
        changes = ("load", "unload", "rollback", "deployment", "try")
        for path in (*(f"/ui/models/m/{each}" for each in changes), f"/ui/jobs/{job}/promote"):
            refused = await desk.client.post(path, data={"name": "m", "csrf": "0"})
            assert (path, refused.status_code) == (path, 403)
            assert "reload the page" in refused.text
        data = {"csrf": csrf_of((await desk.client.get("/ui/models/m/try")).text)}
        sent = await desk.client.post("/ui/models/m/try", data=data, files={"file-0": ("", b"")})
        assert sent.status_code == 200
        assert "Bearer $CRUCIBLE_KEY" in sent.text

    at_desk(tmp_path, story, keys_required=True)


def test_models_of_others_are_not_found(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        with_doubles(desk)
        await promoted(desk, owner="somebody")
        await signed_in(desk, "infer", "compile")
        listed = await desk.client.get("/ui/models")
        assert "No model yet." in listed.text
        assert "scope <code>admin</code>" in listed.text
        for path in ("", "/live", "/try"):
            assert (await desk.client.get(f"/ui/models/m{path}")).status_code == 404
        sent = await desk.client.post("/ui/models/m/try", data={"csrf": csrf_of(listed.text)})
        assert sent.status_code == 404

    at_desk(tmp_path, story, keys_required=True)


def test_live_figures_follow_the_model_until_it_is_unloaded(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        with_doubles(desk)
        await promoted(desk)
        await desk.service.models.deploy(LOCAL, "m", DeploymentOptions())
        events = live(desk.service, "m", LOCAL, "", update_s=0.01)
        assert b'class="badge ready"' in await anext(events)
        await desk.service.models.unload(LOCAL, "m")
        texts = [text async for text in events]
        assert b'class="badge unloaded"' in texts[-2]
        assert b"event: ended" in texts[-1]
        answer = await asyncio.wait_for(desk.client.get("/ui/models/m/live"), 30)
        assert answer.headers["content-type"].startswith("text/event-stream")

    at_desk(tmp_path, story)


def test_a_job_suggests_a_valid_name() -> None:
    for job in ("digits", HOSTILE, "..", "a/b", "x" * 300, ""):
        assert re.fullmatch(NAME, model_name(job))
    assert model_name("digits") == "digits"


def test_the_figures_show_each_of_several_devices() -> None:
    served = on_two_gpus()
    deployment = DeploymentView(
        state="ready",
        version=1,
        device=served.device,
        devices=served.devices,
        note="<i>gpu:1</i>",
        options=None,
    )
    html = fragment(
        "model_figures.html",
        model=SimpleNamespace(deployment=deployment),
        instances=4,
        figures=figures_between(Counts(0.0), Counts(0.0)),
    )
    assert "version 1 on gpu:0, gpu:3" in html
    assert "3.00 kB of memory" in html
    assert "its worker &lt;b&gt;died" in html
    assert "&lt;i&gt;gpu:1" in html
