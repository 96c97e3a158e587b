"""Make the screenshots here: the service compiles the digits, and Chromium opens its pages.

From the root of the checkout, in the environment of `make demo` with the extra `dev`, on a quiet
host with Chromium:

    python docs/howto/make_screenshots.py
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DATA = ROOT / "calibration_data" / "digits"
ROLES = ("calibration", "selection", "validation")
URL = "http://127.0.0.1:8018"
WIDTH = 1000
PLAN = """
name: digits
profiles: [{batch: [1, 8, 32]}]
accuracy: {metric: top1, thresholds: {min_cosine: 0.9}}
benchmark: {sizes: [{batch: 1}], duration_s: 0.5, budget_s: 60}
"""


def crucible(folder: Path, *words: str) -> str:
    """Return what a command prints; it ends this script if it fails."""
    result = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *words],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if result.returncode:
        sys.exit(f"'{' '.join(words)}' failed with exit code {result.returncode}")
    return result.stdout


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CRUCIBLE_HOME": str(folder / "home"),
        "CRUCIBLE_URL": URL,
        "CRUCIBLE_SERVICE_PORT": URL.rpartition(":")[2],
        "CRUCIBLE_SERVICE_GRPC": "false",
    }


@contextmanager
def service(folder: Path) -> Iterator[None]:
    """The service, while it accepts jobs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", "serve"], cwd=folder, env=environment(folder)
    )
    try:
        for _ in range(120):
            try:
                if httpx.get(f"{URL}/readyz").status_code == 200:
                    break
            except httpx.ConnectError:
                pass
            time.sleep(0.5)
        else:
            sys.exit("the service does not start")
        yield
    finally:
        process.terminate()
        process.wait()


def compile_digits(folder: Path) -> str:
    """Compile the digits on the service, load the engine, and return the job's id."""
    plan = ROOT / "configs" / "digits.yaml"
    crucible(folder, "onnx", str(plan), "--out", str(folder / "digits.onnx"))
    (folder / "plan.yaml").write_text(PLAN, encoding="utf-8")
    data = [word for role in ROLES for word in (f"--{role}", str(DATA / f"{role}.npz"))]
    job = json.loads(
        crucible(folder, "submit", "digits.onnx", "--plan", "plan.yaml", *data, "--wait", "--json")
    )
    crucible(folder, "promote", "digits", job["id"], "--override")
    crucible(folder, "load", "digits")
    return str(job["id"])


def fill_draft(page: Page, folder: Path) -> None:
    """Upload the model on the page "New compile", which leads to its form."""
    page.goto(f"{URL}/ui/new")
    page.set_input_files("#model", folder / "digits.onnx")
    for role in ROLES:
        page.set_input_files(f"#{role}", DATA / f"{role}.npz")
    page.click("button:text-is('Upload')")
    page.wait_for_url("**/ui/drafts/*")


def show_layers(page: Page, report: Path) -> None:
    """Open a report at the shares of each precision, with the graph of the model below."""
    page.goto(report.as_uri())
    page.locator("h2", has_text="What really ran").evaluate("each => each.scrollIntoView()")


def send_digit(page: Page, folder: Path) -> None:
    """Send a digit by the page "Try it", twice: the first request warms up the engine."""
    with np.load(DATA / "selection.npz") as samples:
        np.save(folder / "digit.npy", samples["image"][:1])
    for _ in range(2):
        page.goto(f"{URL}/ui/models/digits/try")
        page.fill("textarea", "")
        page.set_input_files("[type=file]", folder / "digit.npy")
        page.click("button:has-text('Send')")
        page.wait_for_selector("#answer summary")
    page.evaluate("scrollTo(0, 0)")


def main() -> None:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as name, service(folder := Path(name)):
        job = compile_digits(folder)
        crucible(folder, "download", job, "--out", "result")
        with sync_playwright() as playwright:
            browser: Any = playwright.chromium.launch(
                executable_path=program, args=["--no-sandbox"]
            )

            def picture(name: str, page: Page, height: int) -> None:
                page.set_viewport_size({"width": WIDTH, "height": height})
                page.wait_for_timeout(500)  # for drawing
                page.screenshot(path=HERE / f"{name}.png")

            page = browser.new_page(viewport={"width": WIDTH, "height": 1000})
            fill_draft(page, folder)
            picture("new-compile", page, 1000)
            page.goto(f"{URL}/ui/jobs/{job}")
            picture("job-result", page, 1000)
            send_digit(page, folder)
            picture("try-it", page, 1000)
            show_layers(page, folder / "result" / "report.html")
            picture("what-really-ran", page, 1000)
            browser.close()


if __name__ == "__main__":
    main()
