"""The pages in a browser: live updates, no error, nothing that the policy forbids, accessible."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.core.artifacts import Engine
from service.jobs.publish import published_engine
from service.jobs.store import JobStore
from service.registry.models import DeploymentOptions
from service.registry.repository import Repository
from service.storage.database import Database
from service.storage.layout import Folders
from tests.service.builders.app import parts
from tests.service.builders.jobs import WITHIN_S
from tests.service.integration.test_server import Server, send, serving, state_of, until
from tests.service.pages.browser import accessibility_faults, chromium, opened, overflow
from tests.service.pages.test_new_compile import dynamic_model
from tests.service.serving.engines import PROVED, linear, version_of_engine
from tests.service.serving.models import ended_job

__all__ = ["chromium"]  # a fixture
PHONE = {"viewport": {"width": 390, "height": 800}}
THEMES = ("light", "dark")
BROKEN_UPLOAD = "() => { XMLHttpRequest.prototype.send = function () { this.onerror() } }"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("pages")
    store_model(home)
    with serving(home) as server:
        yield server


def store_model(home: Path) -> None:
    """Store the model `m` in a home; the server loads it when it starts."""
    folders = Folders(home)
    with closing(Database(home / "crucible.db")) as database:
        job = ended_job(folders, JobStore(database), engine=linear(home / "engines"))
        engine = published_engine(folders.report(job))
        assert isinstance(engine, Engine)
        version = version_of_engine(engine, PROVED, "m").model_copy(update={"job": job})
        repository = Repository(database, folders)
        repository.add(version, engine.root, current=True)
        repository.set_deployed("m", DeploymentOptions())


@pytest.fixture(scope="module")
def pages(server: Server) -> list[str]:
    """The address of one page of each kind, with content."""
    jobs = [send(server, name) for name in ("succeed", "fail", "succeed-0.1")]
    until(lambda: all(state_of(server, job) in ("succeeded", "failed") for job in jobs))
    both = f"/ui/compare?a={jobs[0]}&b={jobs[2]}"
    one = [f"/ui/jobs/{job}" for job in jobs[:2]]
    log = f"/ui/jobs/{jobs[0]}/log"
    plan = {"plan": ("plan.yaml", b"name: succeed\ntargets: [cpu, gpu]")}
    compiled = httpx.post(f"{server.url}/compile", files=parts("succeed") | plan, timeout=WITHIN_S)
    targets = f"/ui{compiled.json()['link']}"
    until(lambda: httpx.get(f"{server.url}{compiled.json()['link']}").json()["outcome"])
    files = {"model": ("m.onnx", dynamic_model())}
    draft = httpx.post(f"{server.url}/ui/drafts", files=files, timeout=WITHIN_S)
    new = ["/ui/new", draft.headers["Location"]]
    models = ["/ui/models", "/ui/models/m", "/ui/models/m/try"]
    rest = ["/ui/limits", "/ui/admin", "/ui/sign-in", "/ui/jobs/no"]
    return [*new, "/", *one, log, both, targets, *models, *rest]


@pytest.mark.parametrize("theme", THEMES)
def test_no_page_reports_an_error_or_is_hard_to_use(
    chromium: Any, server: Server, pages: list[str], theme: str
) -> None:
    for path in pages:
        faults = accessibility_faults(chromium, server.url + path, color_scheme=theme)
        assert faults == [], path


def test_every_page_fits_a_phone(chromium: Any, server: Server, pages: list[str]) -> None:
    for path in pages:
        if path != "/ui/jobs/no":  # the browser reports the status 404 as an error
            with opened(chromium, server.url + path, **PHONE) as page:
                assert overflow(page) == 0, path


def test_a_job_is_followed_to_its_end(chromium: Any, server: Server) -> None:
    job = send(server, "succeed-2")
    with opened(chromium, f"{server.url}/ui/jobs/{job}") as page:
        page.wait_for_selector(".badge.running", timeout=WITHIN_S * 1000)
        assert page.locator(".verdict").count() == 0
        page.wait_for_selector(".verdict", timeout=WITHIN_S * 1000)
        assert page.locator("button", has_text="Cancel").count() == 0


def test_candidates_appear_on_the_plot_as_they_are_measured(chromium: Any, server: Server) -> None:
    job = send(server, "race")
    url = f"{server.url}/ui/jobs/{job}"
    with opened(chromium, url, **PHONE) as page:
        page.wait_for_selector("td:text-is('not measured')", timeout=WITHIN_S * 1000)
        assert page.locator("circle").count() == 1
        for theme in THEMES:
            assert accessibility_faults(chromium, url, color_scheme=theme) == []
        (server.home / "second").touch()
        page.wait_for_selector("td:text-is('measured')", timeout=WITHIN_S * 1000)
        assert page.locator("circle").count() == 2
        assert overflow(page) == 0
        page.locator("a.point").nth(1).click()
        assert page.url.endswith("#entry-2")
    with opened(chromium, url, java_script_enabled=False) as page:
        assert page.locator("circle").count() == 2
    httpx.delete(f"{server.url}/jobs/{job}")


def test_the_targets_of_a_compile_are_followed_to_their_end(chromium: Any, server: Server) -> None:
    plan = {"plan": ("plan.yaml", b"name: hang\ntargets: [cpu]")}
    answer = httpx.post(f"{server.url}/compile", files=parts("hang") | plan, timeout=WITHIN_S)
    with opened(chromium, f"{server.url}/ui{answer.json()['link']}") as page:
        page.wait_for_selector(".badge.running", timeout=WITHIN_S * 1000)
        httpx.delete(f"{server.url}/jobs/{answer.json()['targets'][0]['job']['id']}")
        page.wait_for_selector("h1 + .badge.cancelled", timeout=WITHIN_S * 1000)
        assert page.locator("#compile").count() == 1


def test_a_job_is_cancelled_by_its_button(chromium: Any, server: Server) -> None:
    job = send(server, "hang")
    with opened(chromium, f"{server.url}/ui/jobs/{job}") as page:
        page.click("button:has-text('Cancel')")
        page.wait_for_selector("button:has-text('Try again')", timeout=WITHIN_S * 1000)
    assert state_of(server, job) == "cancelled"


@pytest.mark.parametrize("script", [True, False])
def test_a_model_is_uploaded_and_compiled(
    chromium: Any, server: Server, tmp_path: Path, script: bool
) -> None:
    model = tmp_path / "succeed.onnx"
    model.write_bytes(dynamic_model())
    with opened(chromium, f"{server.url}/ui/new", java_script_enabled=script) as page:
        page.set_input_files("#model", model)
        page.click("button:text-is('Upload')")
        page.wait_for_url("**/ui/drafts/*")
        for name in ("min_1", "opt_1", "max_1"):
            page.fill(f"[name={name}]", "4")
        page.click("text=Copy as")
        page.click("text=Show the texts")
        page.wait_for_selector("text=crucible submit succeed.onnx")
        page.click("button:text-is('Compile')")
        page.wait_for_url("**/ui/jobs/*")


def test_an_upload_that_breaks_off_says_so(chromium: Any, server: Server, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(dynamic_model())
    with opened(chromium, f"{server.url}/ui/new") as page:
        page.set_input_files("#model", tmp_path / "m.onnx")
        page.evaluate(BROKEN_UPLOAD)
        page.click("button:text-is('Upload')")
        assert "Nothing of the upload was kept" in page.inner_text("[role=alert]")
        page.evaluate("document.querySelector('[data-upload]').dataset.most = 1")
        page.click("button:text-is('Upload')")
        assert "takes at most 1 now" in page.inner_text("[role=alert]")


def test_a_model_is_tried_and_its_figures_follow(chromium: Any, server: Server) -> None:
    url = f"{server.url}/ui/models/m"
    with opened(chromium, url, **PHONE) as page, opened(chromium, f"{url}/try", **PHONE) as form:
        form.fill("textarea", "")
        form.click("button:has-text('Send')")
        form.click("#answer summary")
        assert form.locator("#answer pre").count() == 3
        assert overflow(form) == 0
        page.wait_for_selector(r"dd >> text=/^[\d.]+ (us|ms|s) \//", timeout=WITHIN_S * 1000)


def test_a_page_is_read_without_script(chromium: Any, server: Server, pages: list[str]) -> None:
    with opened(chromium, server.url + pages[3], java_script_enabled=False) as page:
        assert page.locator(".verdict").count() == 1
        assert page.locator("summary").count() > 1
    assert httpx.get(server.url).status_code == 200
