"""The child: what it tells, that it measures only when it may, and one real compile through the
runner.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.compiler.candidates import stages as candidate_stages
from pipeline.core.artifacts import Engine, Note
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision
from pipeline.errors import InternalError, ModelError
from pipeline.execution.child_process import TimeLimit, call_in_child
from pipeline.execution.durations import History
from pipeline.execution.stage_event import StageEvent
from pipeline.execution.stage_runner import Run, Runner
from pipeline.execution.store import MANIFEST, Key, Store
from pipeline.plan.schema import BenchmarkConfig, CandidateConfig, ModelConfig, Plan
from pipeline.plan.source import source_from_config
from pipeline.report.files import load_report
from pipeline.results.benchmarks import BenchmarkFailure, BenchmarkReport, Benchmarks
from pipeline.results.report import Report
from pipeline.stages.benchmark import benchmark
from service.jobs.messages import (
    FROM_CHILD,
    FROM_SERVER,
    Finished,
    FromChild,
    FromServer,
    Granted,
    HostIdentity,
    Made,
    Returned,
    Returns,
    Seeks,
    Sought,
    Stage,
    Start,
    Wants,
)
from service.jobs.publish import take_over
from service.jobs.queue import WORKER
from service.jobs.state import Job
from service.jobs.worker import (
    CHOSEN_CONTENDED,
    CONTENDED,
    DOUBTS,
    Server,
    doubted,
    forget_contended,
    measure_again,
    probe_host,
    quiet_device,
    seed,
)
from service.jobs.worker_client import Child, environment_for
from service.sandbox.framing import decode, frame, read_frame
from service.sandbox.layers import Sandbox, shared_files
from service.storage.layout import PLAN, Folders, Work
from tests.builders.report import benchmark as figures
from tests.builders.report import sample_report
from tests.service.builders.jobs import Bench, new_job, running, write_out


class Peer:
    """The server's end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self.end, self.frames = end, end.makefile("rb")

    def sends(self, *messages: FromServer) -> None:
        for message in messages:
            self.end.sendall(b"".join(frame(FROM_SERVER.dump_json(message))))

    def hears(self, count: int) -> list[FromChild]:
        return [decode(FROM_CHILD, read_frame(self.frames)[0]) for _ in range(count)]


@pytest.fixture
def pair() -> Iterator[tuple[Server, Peer]]:
    ours, theirs = socket.socketpair()
    peer = Peer(ours)
    with ours, theirs, peer.frames, theirs.makefile("rwb") as stream:
        yield Server(stream), peer


@pytest.mark.parametrize(("before", "after"), [(False, False), (True, False), (False, True)])
def test_a_measurement_asks_for_the_device_and_gives_it_back(
    pair: tuple[Server, Peer], tmp_path: Path, before: bool, after: bool
) -> None:
    server, peer = pair
    peer.sends(Granted(contended=before), Returned(contended=after))
    with quiet_device(server, tmp_path / "contended"):
        assert peer.hears(1) == [Wants()]
    assert peer.hears(1) == [Returns()]
    assert (tmp_path / "contended").exists() == (before or after)


def test_a_failed_benchmark_gives_the_device_back_and_a_gone_server_is_an_error(
    pair: tuple[Server, Peer], tmp_path: Path
) -> None:
    server, peer = pair
    peer.sends(Granted(), Returned())
    with (
        pytest.raises(InternalError, match="broken"),
        quiet_device(server, tmp_path / "contended"),
    ):
        raise InternalError("broken")
    assert peer.hears(2) == [Wants(), Returns()]
    peer.sends(Start(plan=Path("/p"), work=Path("/w"), shared=Path("/s"), command="c"))
    with pytest.raises(InternalError, match="answered start"):
        server.lease()
    peer.sends(Granted())
    with pytest.raises(InternalError, match="answered granted"):
        server.give_back()
    peer.end.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        server.lease()


def test_a_child_waits_for_what_another_job_makes_and_tells_what_it_has_made(
    pair: tuple[Server, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.jobs.worker.SEEK_EVERY_S", 0.0)
    server, peer = pair
    key = Key("build", 1, ("abc",))
    seeks = Seeks(stage="build", key=key.digest)
    peer.sends(*(Sought(answer=answer) for answer in ("wait", "wait", "make")))
    with server.build_lock(key):
        asked, waiting, *again = peer.hears(4)
        assert [asked, *again] == [seeks] * 3
        assert isinstance(waiting, Stage)
        assert waiting.event.state == "waiting"
    assert peer.hears(1) == [Made(stage="build", key=key.digest)]


def test_figures_are_not_given_to_others_before_the_job_ends(pair: tuple[Server, Peer]) -> None:
    """They may be forgotten then: see `forget_contended`."""
    server, peer = pair
    key = Key("benchmark", 1, ("abc",))
    peer.sends(Sought(answer="make"))
    with server.build_lock(key):
        assert peer.hears(1) == [Seeks(stage="benchmark", key=key.digest)]
    server.send(Wants())
    assert peer.hears(1) == [Wants()]


def test_progress_is_told_seldom(pair: tuple[Server, Peer]) -> None:
    server, peer = pair
    for number in range(1000):
        server.emit(StageEvent("build", "", number / 1000, state="progress"))
    server.emit(StageEvent("build", "", seconds=2.0, state="finished"))
    heard: list[Stage] = []
    while not heard or heard[-1].event.state != "finished":
        (message,) = peer.hears(1)
        assert isinstance(message, Stage)
        heard.append(message)
    assert len(heard) < 50


def test_contended_figures_accept_nothing_and_are_not_kept(tmp_path: Path) -> None:
    report = doubted(sample_report(), CONTENDED)
    assert (report.verdict, report.reasons[-1], report.notes[-1]) == (
        "unproven",
        CONTENDED.text,
        CONTENDED,
    )
    assert (
        doubted(report.model_copy(update={"verdict": "rejected"}), CONTENDED).verdict == "rejected"
    )
    stages = ("benchmark", "throughput", "width")
    figures = [tmp_path / "artifacts" / stage / "x" for stage in stages]
    for folder in figures:
        folder.mkdir(parents=True)
    forget_contended(tmp_path)
    assert all(folder.exists() for folder in figures)
    (tmp_path / "contended").touch()
    forget_contended(tmp_path)
    assert not any(folder.exists() for folder in figures)
    assert not (tmp_path / "contended").exists()


def test_a_child_begins_with_the_times_of_the_home_and_keeps_its_own(tmp_path: Path) -> None:
    shared, home = tmp_path / "shared", tmp_path / "home"
    shared.mkdir()
    home.mkdir()
    History(shared).add("build", "a", 3.0)
    cache = shared / "timing" / "k" / "cache.bin"
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"cache")
    (cache.parent / "lock").touch()
    seed(shared, home)
    assert History(home).estimate("build", "a") == 3.0
    assert [path.name for path in (home / "timing" / "k").iterdir()] == ["cache.bin"]
    (home / "timing" / "k" / "cache.bin").write_bytes(b"newer")
    seed(shared, home)
    assert (home / "timing" / "k" / "cache.bin").read_bytes() == b"newer"


def tiny_model(path: Path) -> None:
    """y = relu(x @ w)."""
    weight = numpy_helper.from_array(
        np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32), "w"
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "matmul"),
        helper.make_node("Relu", ["h"], ["y"], "relu"),
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size])
        for name, size in (("x", 16), ("y", 4))
    )
    onnx.save(
        helper.make_model(
            helper.make_graph(nodes, "tiny", [x], [y], [weight]),
            opset_imports=[helper.make_opsetid("", 17)],
            ir_version=8,
        ),
        path,
    )


@pytest.mark.parametrize("doubts", [(), (CONTENDED,), (CHOSEN_CONTENDED,)])
def test_a_candidate_that_was_chosen_by_contended_figures_stays_unproven(
    tmp_path: Path, doubts: tuple[Note, ...]
) -> None:
    plan, old = compiled_before(tmp_path)
    for why in doubts:
        old = doubted(old, why)
    (tmp_path / "compiled" / "report.json").write_text(old.model_dump_json())
    events: list[StageEvent] = []
    runner = Runner(Store(tmp_path / "home"), events.append, run=with_figures_of(benchmarked))
    report = measure_again(tmp_path / "compiled", plan, runner, "again")
    known = {event.figures.is_baseline: event.figures for event in events if event.figures}
    assert known.keys() == {True, False}
    winner = next(each for each in old.candidates if each.label == old.winner)
    assert winner.selection is not None
    assert known[False].accuracy == winner.selection.figures
    assert (report.verdict, report.command) == ("unproven" if doubts else "accepted", "again")
    expected = [CHOSEN_CONTENDED] if doubts else []
    assert [note for note in report.notes if note.code in DOUBTS] == expected
    texts = {CONTENDED.text, CHOSEN_CONTENDED.text}
    assert [reason for reason in report.reasons if reason in texts] == [
        note.text for note in expected
    ]


def test_an_engine_that_cannot_be_measured_or_whose_model_changed_says_so(tmp_path: Path) -> None:
    plan, old = compiled_before(tmp_path)
    runner = Runner(Store(tmp_path / "home"), run=with_figures_of(lost))
    with pytest.raises(ModelError, match="cannot be measured: it died"):
        measure_again(tmp_path / "compiled", plan, runner, "again")
    (tmp_path / "compiled" / "report.json").write_text(
        old.model_copy(update={"source_digest": "other"}).model_dump_json()
    )
    with pytest.raises(ModelError, match="have changed since this engine was compiled"):
        measure_again(tmp_path / "compiled", plan, runner, "again")


def compiled_before(folder: Path) -> tuple[Plan, Report]:
    """A plan of a real model, and in `compiled` a report of it with an engine."""
    tiny_model(folder / "tiny.onnx")
    plan = Plan(name="tiny", model=ModelConfig(path=folder / "tiny.onnx"))
    report = write_out(folder / "compiled", folder / "store")
    report = report.model_copy(update={"source_digest": source_from_config(plan.model, ()).digest})
    (folder / "compiled" / "report.json").write_text(report.model_dump_json())
    return plan, report


def with_figures_of(results: Callable[[Engine], BenchmarkReport | BenchmarkFailure]) -> Run:
    """Stages run as ever, but a benchmark finds this of each engine."""

    def run(
        function: Callable[..., Any],
        *arguments: Any,
        name: str,
        log: Path | None = None,
        progress: Progress = silent,
        limit: TimeLimit | None = None,
    ) -> Any:
        if function is not benchmark:
            return call_in_child(
                function, *arguments, name=name, log=log, progress=progress, limit=limit
            )
        return Benchmarks(
            created="2026-05-05T00:00:00+00:00",
            results=tuple(results(entry.engine) for entry in arguments[0]),
        )

    return run


def benchmarked(engine: Engine) -> BenchmarkReport:
    return figures(engine.recipe.label, 4.0, None if engine.recipe.variant else 8.0)


def lost(engine: Engine) -> BenchmarkFailure:
    return BenchmarkFailure(label=engine.recipe.label, reason="it died")


def upload(bench: Bench, identity: str, **changes: Any) -> Job:
    return uploaded(bench.folders, identity, **changes)


def uploaded(folders: Folders, identity: str, **changes: Any) -> Job:
    job = new_job(folders, "tiny", identity=identity)
    place = folders.uploads(job.id) / "model.onnx"
    tiny_model(place)
    candidate = CandidateConfig(backend="onnxruntime", precision=Precision.FP32)
    plan = Plan(
        name="tiny",
        model=ModelConfig(path=place),
        candidates=(candidate,),
        benchmark=BenchmarkConfig(duration_s=0.1, budget_s=0.01),
    )
    folders.save_plan(job.id, plan.model_copy(update=changes))
    return job


@pytest.mark.slow
def test_a_real_model_is_compiled_and_the_next_job_finds_what_the_first_made(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with running(tmp_path, worker=WORKER) as bench:
            first, _ = await bench.runner.submit(upload(bench, "first"))
            ended = await until_ended(bench, first)
            assert ended.state == "succeeded", (
                ended.failure,
                bench.folders.work(first.id).log.read_text(),
            )
            assert (ended.verdict, ended.winner) == ("unproven", "onnxruntime fp32")
            report = load_report(bench.folders.report(first.id))
            assert report.command == f"a request to the service, job {first.id} ('tiny')"
            assert (bench.folders.report(first.id) / "engine" / "model.onnx").is_file()
            texts = [
                file
                for file in bench.folders.report(first.id).rglob("*")
                if file.is_file() and str(tmp_path).encode() in file.read_bytes()
            ]
            assert texts == []
            assert load_report(bench.folders.report(first.id)).plan.model.path == Path("model.onnx")
            stages = [
                event.data["stage"]
                for event in bench.store.events(first.id)
                if event.kind == "stage" and event.data["state"] == "finished"
            ]
            assert {"export", "simplify", "reference", "build", "benchmark"} <= set(stages)

            measured = {each.label: each for each in bench.store.figures(first.id)}
            chosen = measured["onnxruntime fp32"]
            assert chosen.latency is not None
            assert chosen.accuracy is not None
            assert chosen.accuracy.passed
            assert any(each.is_baseline and each.latency for each in measured.values())

            again, _ = await bench.runner.submit(upload(bench, "again"))
            assert (await until_ended(bench, again)).state == "succeeded"
            states = {
                event.data["stage"]: event.data["state"]
                for event in bench.store.events(again.id)
                if event.kind == "stage"
            }
            renewed = {each.label: each for each in bench.store.figures(again.id)}
            assert renewed.keys() == measured.keys()
            assert renewed["onnxruntime fp32"].accuracy == chosen.accuracy
            assert states["export"] == states["simplify"] == states["build"] == "reused"

            broken, _ = await bench.runner.submit(
                upload(bench, "broken", model=ModelConfig(path=tmp_path / "no.onnx"))
            )
            failed = await until_ended(bench, broken)
            assert failed.failure is not None
            assert failed.failure.code in ("plan.invalid", "model.invalid")

    asyncio.run(story())


async def until_ended(bench: Bench, job: Job) -> Job:
    """As `Bench.until`, for what takes longer on a busy machine."""
    while not (current := bench.store.get(job.id)).is_final:
        await asyncio.sleep(0.1)
    return current


@pytest.mark.slow
def test_a_compile_changes_nothing_outside_its_work_directory(tmp_path: Path) -> None:
    """A convention that nothing enforces. In the store of the home it marks what it finds as used;
    the rest there is the server's doing.
    """
    folders = Folders(tmp_path / "home")
    first, second = (folders.work(uploaded(folders, name).id) for name in ("first", "second"))
    for work in (first, second):
        work.prepare()
        before = everything(tmp_path, work.root)
        asyncio.run(worked(folders, work))
        assert everything(tmp_path, work.root) == before
        assert load_report(work.out).winner == "onnxruntime fp32"
        take_over(work, folders.home)
    assert list(second.home.glob("artifacts/build/*")) == []  # it found that of the first


async def worked(folders: Folders, work: Work) -> None:
    """A job from its child's start to its end, with a server that grants what it wants and
    publishes nothing.
    """
    job = work.root.name
    sandbox = Sandbox(folders.home)
    sandbox.find()
    read, shared = (folders.uploads(job),), shared_files(folders.home)
    box = sandbox.enter(job, work, "cpu", read=read, shared=shared)
    child = await Child.start(
        WORKER, job, work, 2**40, environment_for(job, "cpu", work, os.environ), box
    )
    try:
        await child.send(
            Start(
                plan=folders.uploads(job) / PLAN,
                work=work.root,
                shared=folders.home,
                command="a test",
            )
        )
        while not isinstance(message := await child.receive(), Finished):
            assert isinstance(message, Stage | Wants | Returns), message
            if not isinstance(message, Stage):
                await child.send(Granted() if isinstance(message, Wants) else Returned())
    finally:
        await child.end()


def everything(folder: Path, besides: Path) -> dict[Path, tuple[int, int, bytes]]:
    """Kind, time and content of all that lies in a folder, but not of one folder there. The time of
    an artifact's manifest says that it was used.
    """
    files = {}
    for path in (folder, *folder.rglob("*")):
        if not path.is_relative_to(besides):
            about = path.lstat()
            files[path] = (
                about.st_mode,
                0 if path.name == MANIFEST else about.st_mtime_ns,
                path.read_bytes() if path.is_file() else b"",
            )
    return files


def probe_with_another_build(progress: Progress) -> HostIdentity:
    newer = replace(candidate_stages.BUILD, version=candidate_stages.BUILD.version + 1)
    candidate_stages.STAGES = (*candidate_stages.STAGES, newer)
    return probe_host()


@pytest.mark.slow
def test_the_host_is_told_by_a_child_and_always_alike() -> None:
    ask: Callable[..., Any] = call_in_child
    assert (
        ask(probe_with_another_build, name="probe").digest != ask(probe_host, name="probe").digest
    )  # what was built before is built anew
    first, second = (ask(probe_host, name="probe") for _ in range(2))
    assert first == second
    assert next(iter(first.devices)) == "cpu"
    assert len(first.digest) == 64
    assert first.candidates["onnxruntime fp32"] == ""
    assert "pretend" in first.candidates["onnxruntime fp16"]
