"""A job's child: `python -m service.jobs.worker FD` compiles a plan, or measures its engine again,
and reports to the server through the socket FD.

It is the only module of the service that imports pipeline.compiler, and it does so inside
functions. It runs below a guardian (service/sandbox/guardian.py), which restricts it, in an
environment from worker_client.py, and writes only to its work directory.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from io import BufferedRWPair
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import distribution
from pipeline.core.artifacts import Note, NoteCode, Target
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision
from pipeline.core.shapes import TensorSpec
from pipeline.errors import BackendUnavailable, InternalError, PlanError, UnsupportedError
from pipeline.execution.exit_causes import crucible_error
from pipeline.execution.stage_event import StageEvent
from pipeline.execution.stage_runner import Runner, installed
from pipeline.execution.store import Key, Store
from pipeline.llm.plan import LanguagePlan
from service.jobs.messages import (
    FROM_CHILD,
    FROM_SERVER,
    MEASURING,
    Finished,
    FromChild,
    FromServer,
    Granted,
    HostIdentity,
    Made,
    Pace,
    Returned,
    Returns,
    Seeks,
    Sought,
    Stage,
    Start,
    Wants,
    within_limits,
)
from service.sandbox.framing import decode, failed_from_error, frame, read_frame
from service.storage.layout import Work, plan_of_upload

if TYPE_CHECKING:
    from pipeline.llm.results import LanguageReport
    from pipeline.plan.schema import Plan
    from pipeline.results.report import Report, Verdict

# of the home: copied, because the child adds to them
SEEDED = ("history.jsonl", "timing")
CONTENDED = Note(
    stage="benchmark",
    text=(
        "latency was measured while engines served on the same device: it decides nothing about"
        " speed"
    ),
    code=NoteCode.CONTENDED,
)
CHOSEN_CONTENDED = Note(
    stage="benchmark",
    text=(
        "this candidate was chosen by latencies that were measured while engines served on the"
        " same device: another may be faster"
    ),
    code=NoteCode.CHOSEN_CONTENDED,
)
SEEK_EVERY_S, MAX_SEEK_S = 2.0, 1800.0  # while another job makes the same artifact
DOUBTS = (NoteCode.CONTENDED, NoteCode.CHOSEN_CONTENDED)


class Server:
    """The child's connection to the server."""

    def __init__(self, stream: BufferedRWPair) -> None:
        self._stream = stream
        self._pace = Pace()

    def send(self, message: FromChild) -> None:
        self._stream.writelines(frame(FROM_CHILD.dump_json(message)))
        self._stream.flush()

    def receive(self) -> FromServer:
        """Wait for a message. EOFError if the server is gone."""
        head, _ = read_frame(self._stream)
        return decode(FROM_SERVER, head)

    def emit(self, event: StageEvent) -> None:
        """Report a stage. Its progress is limited to one message every PROGRESS_EVERY_S."""
        if self._pace.lets(event, time.monotonic()):
            self.send(Stage(event=within_limits(event)))

    def lease(self) -> Granted:
        """Wait until the device is granted for a measurement."""
        self.send(Wants())
        answer = self.receive()
        if not isinstance(answer, Granted):
            raise InternalError(f"asked to measure, and the server answered {answer.kind}")
        return answer

    def give_back(self) -> Returned:
        """Release the device for other users."""
        self.send(Returns())
        answer = self.receive()
        if not isinstance(answer, Returned):
            raise InternalError(f"gave the device back, and the server answered {answer.kind}")
        return answer

    @contextmanager
    def build_lock(self, key: Key) -> Iterator[None]:
        """Wait until an artifact is in the shared store, or no other job makes it; tell the end."""
        end_s, digest, is_told = time.monotonic() + MAX_SEEK_S, key.digest, False
        while self._seek(key.stage, digest) == "wait" and time.monotonic() < end_s:
            if not is_told:
                text = f"another job makes {key.stage}; waiting for it"
                self.emit(StageEvent("store", text=text, state="waiting"))
                is_told = True
            time.sleep(SEEK_EVERY_S)
        try:
            yield
        finally:
            if key.stage not in MEASURING:  # they may be forgotten at the end
                self.send(Made(stage=key.stage, key=digest))

    def _seek(self, stage: str, digest: str) -> str:
        self.send(Seeks(stage=stage, key=digest))
        answer = self.receive()
        if not isinstance(answer, Sought):
            raise InternalError(f"asked for an artifact, and the server answered {answer.kind}")
        return answer.answer


def run_job(start: Start, server: Server) -> None:
    """Compile the plan, or measure its engine again, and write the report to the work directory's
    out/.
    """
    work = Work(start.work)
    seed(start.shared, work.home)
    forget_contended(work.home)
    plan = plan_of_upload(start.plan)
    store = Store(
        work.home,
        on_wait=lambda text: server.emit(StageEvent("store", text=text, state="waiting")),
        shared=start.shared,
        build_lock=server.build_lock if start.shares_builds else None,
    )
    measuring = partial(quiet_device, server, _mark(work.home))
    runner = Runner(store, server.emit, quiet_device=measuring, plan=plan.name)
    if isinstance(plan, LanguagePlan):
        compile_language_model(plan, runner, work, start.command)
    else:
        compile_engines(plan, runner, work, start)
    forget_contended(work.home)


def compile_engines(plan: Plan, runner: Runner, work: Work, start: Start) -> None:
    """Compile a plan, or measure its engine again, and write the report."""
    from pipeline.compiler.compile import compile_plan, publish_report

    command, compiled = start.command, start.compiled
    report = (
        compile_plan(plan, runner, command)
        if compiled is None
        else measure_again(compiled, plan, runner, command)
    )
    publish_report(doubted(report, CONTENDED) if _mark(work.home).exists() else report, work.out)


def compile_language_model(plan: LanguagePlan, runner: Runner, work: Work, command: str) -> None:
    """Compile the plan of a language model, and write the report."""
    from pipeline.llm import compile as language
    from pipeline.llm.render import publish

    report = language.compile_language_model(plan, runner, command)
    publish(doubted_language(report) if _mark(work.home).exists() else report, work.out)


def measure_again(compiled: Path, plan: Plan, runner: Runner, command: str) -> Report:
    """Return the report in `compiled` with new latencies of its engine. A choice that was made by
    contended latencies stays marked as such.
    """
    from pipeline.compiler.remeasure import report_again
    from pipeline.report.bundle import load_engine
    from pipeline.report.files import load_report

    old = load_report(compiled)
    notes = tuple(note for note in old.notes if note.code not in DOUBTS)
    plain = old.model_copy(update={"notes": notes})
    report = report_again(plain, plan, load_engine(compiled), runner, command)
    return report if notes == old.notes else doubted(report, CHOSEN_CONTENDED)


@contextmanager
def quiet_device(server: Server, mark: Path) -> Iterator[None]:
    """Lease the device for a measurement. Creates the file `mark` if engines served there."""
    if server.lease().contended:
        mark.touch()
    try:
        yield
    finally:
        if server.give_back().contended:
            mark.touch()


def doubted(report: Report, doubt: Note) -> Report:
    """Return the report with its verdict lowered to `unproven`, because its figures prove nothing
    about speed.
    """
    return report.model_copy(
        update={
            "verdict": _doubted_verdict(report.verdict),
            "reasons": (*report.reasons, doubt.text),
            "notes": (*report.notes, doubt),
        }
    )


def doubted_language(report: LanguageReport) -> LanguageReport:
    """Return the report of a language model as `doubted` does, because its race was contended."""
    return report.model_copy(
        update={
            "verdict": _doubted_verdict(report.verdict),
            "reasons": (*report.reasons, CONTENDED.text),
            "notes": (*report.notes, CONTENDED.text),
        }
    )


def _doubted_verdict(verdict: Verdict) -> Verdict:
    return "unproven" if verdict in ("accepted", "keep") else verdict


def forget_contended(home: Path) -> None:
    """Delete figures that were measured beside serving engines, so that no later run uses them."""
    if _mark(home).exists():
        for stage in MEASURING:
            shutil.rmtree(home / "artifacts" / stage, ignore_errors=True)
        _mark(home).unlink()


def _mark(home: Path) -> Path:
    return home / "contended"


def seed(shared: Path, home: Path) -> None:
    """Copy the home's history and timing caches. Those of an earlier attempt are newer and stay."""
    for name in SEEDED:
        source, target = shared / name, home / name
        if target.exists() or not source.exists():
            continue
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("lock", ".*"))
        else:
            shutil.copy(source, target)


# -- the host's part of a job's identity -----------------------------


def probe_host(progress: Progress = silent) -> HostIdentity:
    """Return this host's devices and a digest of its devices, targets and tools. Call it through
    `call_in_child`: it imports every installed backend.
    """
    import hashlib
    import json

    from pipeline.backends import BACKENDS, backend
    from pipeline.compiler import compile
    from pipeline.compiler.candidates import stages as candidate_stages
    from pipeline.host.labels import device_labels
    from pipeline.llm.compile import STAGES as LANGUAGE_STAGES

    targets = {}
    candidates: dict[str, str] = {}
    for name in BACKENDS:
        try:
            target = backend(name).probe()
        except BackendUnavailable as error:
            targets[name] = {"absent": error.message}
            candidates |= {f"{name} {precision}": error.message for precision in Precision}
            continue
        targets[name] = target.model_dump(mode="json")
        candidates |= {f"{name} {each}": _refusal(name, each, target) for each in Precision}
    stages = (*compile.STAGES, *candidate_stages.STAGES, *LANGUAGE_STAGES)
    versions = [(stage.name, stage.tools, stage.version) for stage in stages]
    tools = {tool: installed(tool) for stage in stages for tool in stage.tools} | {
        "crucible": distribution.version()
    }
    labels = device_labels()
    devices = {name: device["name"] for name, device in labels.items()}
    facts = json.dumps([devices, targets, versions, tools], sort_keys=True)
    digest = hashlib.sha256(facts.encode()).hexdigest()
    return HostIdentity(
        devices=devices,
        digest=digest,
        candidates=candidates,
        labels=labels,
        language_models=_language_refusal(devices),
    )


def _language_refusal(devices: Collection[str]) -> str:
    """Return why this host compiles no language models, on a CPU or on a GPU; "" if it does."""
    from pipeline.llm.compile import check_packages, missing_packages
    from pipeline.llm.plan import LIBRARIES_ON

    has_gpu = any(device.startswith("gpu:") for device in devices)
    if has_gpu and not all(map(missing_packages, LIBRARIES_ON["gpu"])):
        return ""
    try:
        check_packages()
    except BackendUnavailable as error:
        return f"{error.message}; {error.next_step}"
    return ""


def _refusal(name: str, precision: Precision, target: Target) -> str:
    """Return why a backend refuses a precision on this host, whatever the model is; "" if it does
    not.
    """
    from pipeline.backends import backend
    from pipeline.plan.recipes import recipes_from_candidate
    from pipeline.plan.schema import CandidateConfig, ModelConfig, Plan

    suffix = "pt2" if name == "torch" else "onnx"
    inputs = (TensorSpec(name="x", dtype="float32", shape=(1,)),)
    plan = Plan(model=ModelConfig(path=Path(f"model.{suffix}"), inputs=inputs))
    candidate = CandidateConfig(backend=name, precision=precision)
    try:
        for recipe in recipes_from_candidate(candidate, target, plan, calibrated=True):
            backend(name).check_recipe(recipe, target)
    except (PlanError, UnsupportedError) as error:
        return error.message
    return ""


# -- the process -------------------------------------------------------------


def main(descriptor: int) -> None:
    """Run the job that the server sends, and end the process. Never returns."""
    os.set_inheritable(descriptor, False)
    server = Server(socket.socket(fileno=descriptor).makefile("rwb"))
    message: FromChild = Finished()
    try:
        start = server.receive()
        if not isinstance(start, Start):
            raise InternalError(f"the server began with {start.kind}")
        run_job(start, server)
    except Exception as error:  # noqa: BLE001  edge of a process: every error must reach the server
        traceback.print_exc()  # to the job's log
        message = failed_from_error(crucible_error(error))
    server.send(message)
    os._exit(0)  # threads of libraries may hang


if __name__ == "__main__":
    # the importable module, not this copy: stages are found by module name
    from service.jobs import worker as job_worker

    job_worker.main(int(sys.argv[1]))
