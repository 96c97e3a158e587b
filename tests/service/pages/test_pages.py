"""The frame of the pages, signing in, and the pages of jobs, over HTTP."""

import asyncio
import re
import time
from contextlib import AsyncExitStack
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from service.http.guard import SESSION_COOKIE
from service.pages.sign_in import own_path
from service.pages.static_files import files
from tests.service.builders.app import Desk, at_desk, parts
from tests.service.builders.jobs import WITHIN_S

HOSTILE = "<script>alert(1)</script>"


async def signed_in(desk: Desk, *scopes: str) -> str:
    """Give the client the cookie of a new key's session. Returns the key's prefix."""
    key, text = desk.service.keys.create("page", scopes)
    answer = await desk.client.post("/ui/sign-in", data={"key": text, "next": "/"})
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")
    return key.prefix


def csrf_of(page: str) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]+)"', page)
    assert found
    return found[1]


class Scripts(HTMLParser):
    """Counts what could run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        if tag == "script" and not (names.get("src") or "").startswith("/ui/static/"):
            self.found.append(tag)
        self.found += [name for name in names if name.startswith("on")]


def test_on_loopback_nobody_signs_in(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        page = await desk.client.get("/")
        assert page.status_code == 200
        assert "No job yet." in page.text
        assert "Sign out" not in page.text
        assert "script-src 'self'" in page.headers["Content-Security-Policy"]

    at_desk(tmp_path, story)


def test_a_key_opens_a_session_that_ends(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        client = desk.client
        refused = await client.get("/ui/jobs/x")
        assert refused.status_code == 303
        assert refused.headers["Location"] == "/ui/sign-in?next=/ui/jobs/x"
        wrong = await client.post("/ui/sign-in", data={"key": "cru_no"})
        assert wrong.status_code == 401
        assert "is not known" in wrong.text
        prefix = await signed_in(desk, "compile")
        cookie = client.cookies[SESSION_COOKIE]
        home = await client.get("/")
        assert home.status_code == 200
        assert (await client.get("/jobs")).status_code == 401, "an API path takes no cookie"
        assert (await client.post("/ui/sign-out")).status_code == 403, "without the token"
        out = await client.post("/ui/sign-out", data={"csrf": csrf_of(home.text)})
        assert out.headers["Location"] == "/ui/sign-in"
        client.cookies.set(SESSION_COOKIE, cookie)
        assert (await client.get("/")).status_code == 303, "the old cookie is worth nothing"
        client.cookies.clear()
        prefix = await signed_in(desk, "compile")
        desk.service.keys.revoke(prefix)
        assert (await client.get("/")).status_code == 303

    at_desk(tmp_path, story, keys_required=True)


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        text = desk.service.keys.create("page", ("infer",))[1]
        answer = await desk.client.post("/ui/sign-in", data={"key": text})
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        foreign = {"Origin": "https://evil.example"}
        refused = await desk.client.post("/ui/sign-in", data={"key": text}, headers=foreign)
        assert refused.status_code == 403

    at_desk(tmp_path, story, keys_required=True)


def test_what_the_guard_refuses_is_a_page_for_readers_of_pages(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        host = {"Host": "evil.example"}
        for path, form in (("/ui/models", "text/html"), ("/models", "application/json")):
            refused = await desk.client.get(path, headers=host)
            assert refused.status_code == 421, refused.text
            assert refused.headers["Content-Type"].startswith(form)
            assert refused.headers["X-Request-Id"]
            assert "evil.example" in refused.text
        large = await desk.client.post("/ui/sign-in", content=b"x" * 2000)
        assert large.status_code == 413
        assert "expected at most 1000" in large.text
        assert large.text.startswith("<!doctype html>")

    at_desk(tmp_path, story, max_body_bytes=1000)


def test_a_stream_that_is_refused_is_asked_for_again(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        job = (await desk.compile("hang")).json()["id"]
        async with AsyncExitStack() as stack:
            for _ in range(desk.service.settings.max_streams):
                await stack.enter_async_context(desk.service.limits.stream(""))
            refused = await desk.client.get(f"/ui/jobs/{job}/live")
        assert (refused.status_code, refused.text) == (200, "retry: 5000\n\n")
        assert refused.headers["Content-Type"].startswith("text/event-stream")
        await desk.client.post(f"/jobs/{job}/cancel")

    at_desk(tmp_path, story)


def test_a_second_cookie_of_another_site_ends_no_check(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await signed_in(desk, "compile")
        cookie = desk.client.cookies[SESSION_COOKIE]
        desk.client.cookies.clear()
        both = {"Cookie": f"{SESSION_COOKIE}={cookie}; {SESSION_COOKIE}="}
        answer = await desk.client.post("/ui/sign-out", headers=both)
        assert answer.headers["Location"].startswith("/ui/sign-in?")
        own = {"Cookie": f"{SESSION_COOKIE}={cookie}"}
        assert (await desk.client.get("/", headers=own)).status_code == 200

    at_desk(tmp_path, story, keys_required=True)


def test_a_stream_ends_with_its_session(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        prefix = await signed_in(desk, "compile")
        text = desk.service.keys.create("own", ("compile",), owner=f"key:{prefix}")[1]
        headers = {"Authorization": f"Bearer {text}"}
        job = (await desk.compile("hang", headers)).json()["id"]
        follow = asyncio.create_task(desk.client.get(f"/ui/jobs/{job}/live"))
        await asyncio.sleep(0.5)
        desk.service.keys.revoke(prefix)
        desk.service.runner.changed(job).set()
        stream = await asyncio.wait_for(follow, 20)
        assert stream.text.count("event: ended") == 1
        assert 'class="badge cancelled"' not in stream.text
        again = await desk.client.get(f"/ui/jobs/{job}/live", headers={"HX-Request": "true"})
        assert again.status_code == 401, "the browser then waits longer and longer"
        assert again.headers["HX-Redirect"].startswith("/ui/sign-in")

    at_desk(tmp_path, story, keys_required=True)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/ui/jobs/x?a=1", "/ui/jobs/x?a=1"),
        ("//evil.example", "/"),
        ("https://evil.example", "/"),
        ("/\\evil.example", "/"),
        ("/\nSet-Cookie: x", "/"),
        ("", "/"),
    ],
)
def test_signing_in_leads_only_to_this_site(path: str, expected: str) -> None:
    assert own_path(path) == expected


def test_a_job_is_shown_to_its_owner_and_to_nobody_else(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        mine = desk.key("compile")
        job = (await desk.compile("hang", mine)).json()["id"]
        prefix = mine["Authorization"].split("_")[1]
        await signed_in(desk, "compile")
        for path in (f"/ui/jobs/{job}", f"/ui/jobs/{job}/log", f"/ui/jobs/{job}/live"):
            missing = await desk.client.get(path)
            assert missing.status_code == 404
            assert "Not found" in missing.text
        listed = await desk.client.get("/")
        assert "No job yet." in listed.text
        token = csrf_of(listed.text)
        refused = await desk.client.post(f"/ui/jobs/{job}/cancel", data={"csrf": token})
        assert refused.status_code == 404
        assert (await desk.client.get(f"/jobs/{job}", headers=mine)).json()["state"] != "cancelled"
        assert prefix not in listed.text

    at_desk(tmp_path, story, keys_required=True)


def test_a_key_without_the_scope_sees_no_button_and_may_not_press_it(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        text = desk.service.keys.create("reader", ("infer",), owner="ann")[1]
        writer = desk.service.keys.create("writer", ("compile",), owner="ann")[1]
        headers = {"Authorization": f"Bearer {writer}"}
        job = (await desk.compile("hang", headers)).json()["id"]
        await desk.client.post("/ui/sign-in", data={"key": text})
        page = (await desk.client.get(f"/ui/jobs/{job}")).text
        assert "hang" in page
        assert "Cancel" not in page
        data = {"csrf": csrf_of(page)}
        refused = await desk.client.post(f"/ui/jobs/{job}/cancel", data=data)
        assert refused.status_code == 403
        assert "has no scope" in refused.text

    at_desk(tmp_path, story, keys_required=True)


def test_a_job_is_cancelled_and_tried_again(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        job = (await desk.compile("hang")).json()["id"]
        await desk.until(job, "running")
        assert "Cancel" in (await desk.client.get(f"/ui/jobs/{job}")).text
        answer = await desk.client.post(f"/ui/jobs/{job}/cancel")
        assert answer.headers["Location"] == f"/ui/jobs/{job}"
        await desk.until(job, "cancelled")
        assert "Try again" in (await desk.client.get(f"/ui/jobs/{job}")).text
        again = await desk.client.post(f"/ui/jobs/{job}/retry")
        assert again.headers["Location"].startswith("/ui/jobs/")
        assert again.headers["Location"] != f"/ui/jobs/{job}"
        cancelled = await desk.client.post(f"/ui/jobs/{job}/cancel")
        assert cancelled.status_code == 409
        assert "This did not work" in cancelled.text

    at_desk(tmp_path, story)


def test_a_result_is_shown_with_its_parts(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        job = await desk.end_of("succeed")
        page = (await desk.client.get(f"/ui/jobs/{job['id']}")).text
        assert f'class="banner {job["verdict"]}"' in page
        assert "Whole report" in page
        assert 'id="candidates" open' in page or "Candidates" in page
        assert "hx-sse:connect" not in page, "nothing changes any more"
        report = await desk.client.get(f"/ui/jobs/{job['id']}/report")
        assert report.headers["content-type"].startswith("text/html")
        failed = await desk.end_of("fail")
        assert "This job failed" in (await desk.client.get(f"/ui/jobs/{failed['id']}")).text

    at_desk(tmp_path, story)


def test_live_updates_begin_with_the_present_and_end_with_the_job(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        job = await desk.end_of("succeed")
        stream = await desk.client.get(f"/ui/jobs/{job['id']}/live")
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert 'class="badge succeeded"' in stream.text
        assert "event: ended" in stream.text

    at_desk(tmp_path, story)


def test_candidates_appear_on_the_page_while_they_are_measured(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        job = (await desk.compile("race")).json()["id"]
        await desk.until(job, "running")
        url = f"/ui/jobs/{job}"
        first = await until_shown(desk, url, "not measured")
        assert first.count("<circle") == 1
        assert "<td>baseline</td>" in first
        assert "eager &lt;b&gt;" in first
        assert "<b>" not in first
        follow = asyncio.create_task(desk.client.get(f"{url}/live"))
        (tmp_path / "second").touch()
        both = await until_shown(desk, url, "<td>measured</td>")
        assert both.count("<circle") == 2
        assert "drop of top1" in both
        await desk.client.post(f"{url}/cancel")
        stream = (await follow).text
        assert stream.count("<circle") >= 4, "two points, and again when the job has ended"
        ended = (await desk.client.get(url)).text
        assert ended.count("<circle") == 2, "they stay when the job was cancelled"
        events = (await desk.client.get(f"/jobs/{job}/events")).text
        assert events.count("event: figures\n") == 3

    at_desk(tmp_path, story)


async def until_shown(desk: Desk, url: str, text: str) -> str:
    """Load a page again and again, as a reader without script does, until it has a text."""
    end = time.monotonic() + WITHIN_S
    while text not in (page := (await desk.client.get(url)).text):
        assert time.monotonic() < end, page
        await asyncio.sleep(0.05)
    return page


def test_figures_that_cannot_be_true_end_the_job(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        job = await desk.end_of("invent")
        assert (job["state"], job["failure"]["code"]) == ("failed", "job.protocol")
        assert "Measured so far" not in (await desk.client.get(f"/ui/jobs/{job['id']}")).text

    at_desk(tmp_path, story)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        answer = await desk.client.post("/compile", files=parts(f"'fail {HOSTILE}'"))
        assert answer.status_code in (202, 422)
        missing = await desk.client.get(f"/ui/jobs/{HOSTILE}")
        pages: list[httpx.Response] = [await desk.client.get("/"), missing]
        if answer.status_code == 202:
            pages.append(await desk.client.get(f"/ui/jobs/{answer.json()['id']}"))
        for page in pages:
            assert Scripts(page.text).found == []
            assert HOSTILE not in page.text

    at_desk(tmp_path, story)


def test_files_may_be_kept_only_as_long_as_they_are_the_newest(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        home = (await desk.client.get("/")).text
        found = re.findall(r'(?:href|src)="(/ui/static/[^"]+)"', home)
        assert len(found) >= 3
        for path in found:
            file = await desk.client.get(path)
            assert "immutable" in file.headers["Cache-Control"]
            old = await desk.client.get(path.partition("?")[0])
            assert old.headers["Cache-Control"] == "no-cache"
        missing = await desk.client.get("/ui/static/..%2f__init__.py")
        assert missing.status_code == 404
        assert "htmx.LICENSE" not in files()

    at_desk(tmp_path, story)


def test_pages_and_streams_end_with_the_server(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        job = (await desk.compile("hang")).json()["id"]
        await desk.until(job, "running")
        follow = asyncio.create_task(desk.client.get(f"/ui/jobs/{job}/live"))
        await asyncio.sleep(0.2)
        desk.service.stopping = True
        desk.service.runner.changed(job).set()
        stream = await asyncio.wait_for(follow, 10)
        assert "event: ended" not in stream.text, "the browser connects again"
        assert 'class="badge running"' in stream.text
        desk.service.stopping = False

    at_desk(tmp_path, story)


def test_the_targets_of_a_compile_are_side_by_side(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.service.runner._labels = {"cpu": {"threads": "2"}}
        await signed_in(desk, "compile", "infer")
        mine = desk.service.keys.create("mine", ("compile",), owner="me")[1]
        plan = b"name: succeed\ntargets: [cpu, {name: one, device: cpu, threads: 1}, gpu]"
        files = parts("succeed") | {"plan": ("plan.yaml", plan)}
        headers = {"Authorization": f"Bearer {mine}"}
        compiled = (await desk.client.post("/compile", files=files, headers=headers)).json()
        path = f"/ui{compiled['link']}"
        assert (await desk.client.get(path)).status_code == 404, "it is another owner's"

        await signed_in(desk, "admin")
        jobs = [target["job"]["id"] for target in compiled["targets"]]
        end = time.monotonic() + WITHIN_S
        while "hx-get" in (text := (await desk.client.get(path)).text):
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        for shown in (*jobs, "threads&gt;=1", "unavailable", "accepted", "no node has"):
            assert shown in text, shown
        assert f"/ui/compare?a={jobs[0]}&amp;b={jobs[1]}" in text
        assert text.count(">report</a>") == 2
        assert (await desk.client.get("/")).text.count(path) == 3
        for job in jobs:
            assert path in (await desk.client.get(f"/ui/jobs/{job}")).text
        assert not Scripts(text).found

    at_desk(tmp_path, story, keys_required=True)


def test_a_compile_that_goes_on_is_asked_for_again(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        plan = ("plan.yaml", b"name: hang\ntargets: [cpu]")
        answer = await desk.client.post("/compile", files=parts("hang") | {"plan": plan})
        path = f"/ui{answer.json()['link']}"
        assert f'hx-get="{path}"' in (await desk.client.get(path)).text
        job = answer.json()["targets"][0]["job"]["id"]
        await desk.client.delete(f"/jobs/{job}")
        await desk.until(job, "cancelled")
        text = (await desk.client.get(path)).text
        assert ("cancelled" in text, "hx-get" in text) == (True, False)

    at_desk(tmp_path, story)
