"""The site of the documentation builds with strict links and loads nothing from other hosts."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from service.http.routers.documentation import Site, open_site
from tests.docs.console import PAGES, Block, blocks_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", built],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return built


@pytest.fixture(scope="module")
def site(folder: Path) -> Site:
    return open_site(folder)


def pages_of(site: Site) -> dict[str, str]:
    pages = {name: file for name, file in site.files.items() if name.endswith(".html")}
    assert len(pages) > 15
    return {name: file.read_text(encoding="utf-8") for name, file in pages.items()}


def test_pages_load_nothing_from_other_hosts(site: Site) -> None:
    for name, text in pages_of(site).items():
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"([^\"]*)\"", text)
        loaded += re.findall(r"<link[^>]*rel=\"(?:stylesheet|icon)\"[^>]*href=\"([^\"]*)\"", text)
        loaded += re.findall(r"<link[^>]*href=\"([^\"]*)\"[^>]*rel=\"(?:stylesheet|icon)\"", text)
        assert loaded, name
        assert not [url for url in loaded if re.match(r"(https?:)?//", url)], name


def test_the_policy_of_each_page_allows_all_of_its_scripts(site: Site) -> None:
    for name, text in pages_of(site).items():
        scripts = re.findall(r"<script(?![^>]*\bsrc=)([^>]*)>(.*?)</script>", text, re.DOTALL)
        inline = [script for kind, script in scripts if "application/json" not in kind]
        assert inline, name
        for script in inline:
            digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in site.hashes[name], name
        assert not re.search(r"<[^>]*\son\w+=", text), name


def test_the_search_finds_the_pages(site: Site) -> None:
    index = json.loads(site.files["search/search_index.json"].read_text(encoding="utf-8"))
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"reference/plan.html", "howto/write-a-plan.html", "troubleshooting.html"} <= places


def test_every_picture_is_small_and_shown_by_a_page() -> None:
    docs = ROOT / "docs"
    pictures = {file for kind in ("png", "svg") for file in docs.rglob(f"*.{kind}")}
    assert len(pictures) > 10
    shown = {
        (page.parent / name).resolve()
        for page in (ROOT / "README.md", *docs.rglob("*.md"))
        for name in re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    }
    assert pictures == shown
    assert all(file.stat().st_size < 200_000 for file in pictures)


def test_the_screenshots_are_those_that_the_script_makes() -> None:
    script = (ROOT / "docs" / "howto" / "make_screenshots.py").read_text(encoding="utf-8")
    made = set(re.findall(r'picture\("([\w-]+)"', script))
    assert made == {file.stem for file in (ROOT / "docs" / "howto").glob("*.png")}


def test_the_commands_of_the_pages_run(tmp_path: Path) -> None:
    blocks = [block for page in PAGES for block in blocks_of(page)]
    run = [block for block in blocks if not block.not_run]
    assert run
    shell = f'set -euo pipefail\ncrucible() {{ {sys.executable} -m pipeline.cli "$@"; }}\n'
    for block in run:
        result = subprocess.run(
            ["bash", "-c", shell + "\n".join(block.commands)],
            cwd=ROOT,
            env={**os.environ, "CRUCIBLE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, (block, result.stderr)


def test_a_block_that_is_not_run_says_why() -> None:
    text = (
        "<!-- not run here: needs a GPU -->\n```console\n$ a\n$ b  # c\n```\n\n```console\n$ d\n```"
    )
    assert blocks_of(text) == [Block(("a", "b  # c"), "needs a GPU"), Block(("d",), "")]
