"""A real browser for tests: Debian's Chromium, driven by Playwright.

A page that reports an error, or that breaks its content security policy, fails its test.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
REPORT_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", event =>
    console.error("policy: " + event.violatedDirective + " " + event.blockedURI))
"""
SUMMARY = """
async () => (await axe.run(document)).violations.map(
    each => each.id + ": " + each.help + " at " + each.nodes.map(node => node.target).join(", "))
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser. Skips where it is not installed; .ci/run installs it and counts the skips.

    It ends with its module: while it runs, its event loop forbids `asyncio.run` in this thread.
    """
    api = pytest.importorskip("playwright.sync_api", reason="browser test: no playwright")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("browser test: no chromium")
    with api.sync_playwright() as playwright:
        # A container's root has no user namespaces for Chromium's own sandbox.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(chromium: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page at this address. Fails at the end if an error was reported."""
    context = chromium.new_context(**options)
    context.add_init_script(REPORT_VIOLATIONS)
    page, faults = context.new_page(), list[str]()
    page.on("console", lambda each: faults.extend([each.text] if each.type == "error" else []))
    page.on("pageerror", lambda error: faults.append(str(error)))
    try:
        page.goto(url)
        yield page
    finally:
        context.close()
    assert faults == []


def accessibility_faults(chromium: Any, url: str, **options: Any) -> list[str]:
    """Return what axe finds. The policy would refuse its script, so this page has none."""
    context = chromium.new_context(bypass_csp=True, **options)
    try:
        page = context.new_page()
        page.goto(url)
        page.add_script_tag(path=AXE)
        faults: list[str] = page.evaluate(SUMMARY)
        return faults
    finally:
        context.close()


def overflow(page: Any) -> int:
    """By how many pixels the page is wider than its window."""
    code = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    return int(page.evaluate(code))
