"""/help shows the site of the documentation, and no other file."""

import base64
import hashlib
import re
from pathlib import Path

import pytest

from pipeline.errors import PlanError
from service.http.routers.documentation import open_site
from tests.service.builders.app import Desk, at_desk

PAGE = '<!doctype html><script>var a=1;</script><script src="app.js"></script><p>Welcome</p>'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    (folder / "howto").mkdir(parents=True)
    (folder / "index.html").write_text(PAGE)
    (folder / "app.js").write_text("var b = 2;")
    (folder / "howto" / "plan.html").write_text("<p>Plan</p>")
    (tmp_path / "secret.html").write_text("secret")
    return folder


def test_the_site_is_shown_without_a_key(tmp_path: Path, site: Path) -> None:
    async def story(desk: Desk) -> None:
        first = await desk.client.get("/help", follow_redirects=True)
        assert (first.status_code, first.url.path) == (200, "/help/index.html")
        assert "Welcome" in first.text
        assert (await desk.client.get("/help/")).text == first.text
        assert (await desk.client.get("/help/howto/plan.html")).text == "<p>Plan</p>"
        script = await desk.client.get("/help/app.js")
        assert script.headers["Content-Type"].startswith("text/javascript")
        assert script.headers["X-Content-Type-Options"] == "nosniff"
        assert (await desk.client.get("/jobs")).status_code == 401

    at_desk(tmp_path / "home", story, docs=site, keys_required=True)


def test_the_policy_allows_the_scripts_of_the_page_and_no_other(tmp_path: Path, site: Path) -> None:
    async def story(desk: Desk) -> None:
        policy = (await desk.client.get("/help/index.html")).headers["Content-Security-Policy"]
        digest = base64.b64encode(hashlib.sha256(b"var a=1;").digest()).decode()
        assert f"script-src 'self' 'sha256-{digest}';" in policy
        assert policy.startswith("default-src 'none';")
        assert "http" not in policy
        plain = (await desk.client.get("/help/howto/plan.html")).headers["Content-Security-Policy"]
        assert "script-src 'self';" in plain

    at_desk(tmp_path / "home", story, docs=site)


@pytest.mark.parametrize(
    "path",
    [
        "../secret.html",
        "..%2Fsecret.html",
        "%2e%2e/secret.html",
        "howto/../../secret.html",
        "%2Fetc%2Fpasswd",
        "howto",
        "index.html%00.js",
        "a" * 5000,
        "%ff",
    ],
)
def test_no_other_file_can_be_named(tmp_path: Path, site: Path, path: str) -> None:
    async def story(desk: Desk) -> None:
        answer = await desk.client.get(f"http://localhost:8000/help/{path}")
        assert (answer.status_code, answer.json()["code"]) == (404, "service.not_found")

    at_desk(tmp_path / "home", story, docs=site)


def test_without_a_site_the_answer_says_how_to_build_it(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        for path in ("/help", "/help/", "/help/index.html"):
            answer = await desk.client.get(path)
            assert answer.status_code == 404
            assert "make docs" in answer.json()["next"]
            assert "CRUCIBLE_SERVICE_DOCS" in answer.json()["next"]

    at_desk(tmp_path / "home", story)


def test_a_site_is_only_read(tmp_path: Path, site: Path) -> None:
    async def story(desk: Desk) -> None:
        for method in ("PUT", "POST", "DELETE"):
            answer = await desk.client.request(method, "/help/index.html")
            assert (answer.status_code, answer.headers["Allow"]) == (405, "GET")

    at_desk(tmp_path / "home", story, docs=site)


def test_a_folder_without_a_site_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=re.escape(f"'{tmp_path}', where no index.html is")):
        open_site(tmp_path)
