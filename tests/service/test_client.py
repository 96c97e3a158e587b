"""The client: what it reads from a stream, and how it stands a server that refuses, goes away and
comes again.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest

from pipeline.errors import PlanError, UserError
from service.client import Client, Event, RemoteError, Unreachable, Upload
from service.client.address import is_remote, place_of
from service.client.client import PATIENCE_S
from service.client.errors import refusal_of
from service.client.events import events_of_stream, wait_times
from service.storage.database import Database
from service.storage.keys import Keys
from tests.service.builders.app import MODEL
from tests.service.builders.jobs import WITHIN_S
from tests.service.integration.test_server import serving, until
from tests.service.routing.test_haproxy import free_pair

STREAM = (
    ': heartbeat\n\nid: 1\nevent: queued\ndata: {"at": "x"}\n\nid: 7\nevent: stage\ndata: {"text":'
    ' "a\u2028b: c"}\n\n'.encode()
)
JOB = "01931f3a5b2c07d1e9a44c6f2"


def upload(folder: Path, name: str) -> Upload:
    """For the double of the worker, which does what the plan's name says."""
    (folder / "model.onnx").write_bytes(MODEL)
    (folder / f"{name}.yaml").write_text(f"name: {name}")
    return Upload(folder / "model.onnx", folder / f"{name}.yaml")


def stream_of(chunks: Iterable[bytes], kind: str = "text/event-stream") -> httpx.Response:
    return httpx.Response(200, headers={"Content-Type": kind}, content=chunks)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    chunks = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    events = [Event(1, "queued", {"at": "x"}), Event(7, "stage", {"text": "a\u2028b: c"})]
    assert list(events_of_stream(stream_of(iter(chunks)))) == events
    more = [
        *chunks,
        b": heartbeat\n\n",
        b"event: server-restarting\ndata: {}\nretry: 2000\n\n",
        b'id: 9\nevent: running\ndata: {"at',
    ]
    assert list(events_of_stream(stream_of(iter(more)))) == events


def test_a_page_in_the_place_of_events_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Client("http://a") as client:
        page = httpx.MockTransport(lambda request: stream_of(iter([b"hello"]), "text/html"))
        monkeypatch.setattr(client, "_http", httpx.Client(base_url="http://a", transport=page))
        with pytest.raises(RemoteError, match="answers in a form that this version"):
            next(client.events(JOB))


def test_patience_ends() -> None:
    assert list(wait_times(4)) == [0.5, 1, 2, 4]
    assert sum(wait_times(PATIENCE_S)) >= PATIENCE_S
    assert list(wait_times(0)) == []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (JOB, (None, JOB)),
        (f"http://a:1/jobs/{JOB}", ("http://a:1", JOB)),
        (f"https://a/crucible/reports/{JOB}/latency?x=1", ("https://a/crucible", JOB)),
    ],
)
def test_a_job_is_named_by_its_id_or_by_an_address(
    text: str, place: tuple[str | None, str]
) -> None:
    assert place_of(text, None) == place
    assert is_remote(text)


@pytest.mark.parametrize("text", ["", "../jobs/1", "http://a/jobs", "ftp://a/jobs/1", "a b"])
def test_what_names_no_job_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="neither a job's id nor an address"):
        place_of(text, "http://a")


@pytest.mark.parametrize("folder", ["crucible-out/digits", "out", JOB[1:], f"{JOB}/report.json"])
def test_folders_are_not_on_a_server(folder: str) -> None:
    assert not is_remote(folder)


def test_a_refusal_is_told_in_the_servers_words() -> None:
    error = refusal_of(
        409,
        b'{"error": "job 1 has ended", "code": "service.conflict", "next": "GET it"}',
        "http://a",
    )
    assert (error.message, error.code, error.next_step, error.status, error.exit_code) == (
        "job 1 has ended",
        "service.conflict",
        "GET it",
        409,
        1,
    )
    assert (
        refusal_of(502, b"<h1>Bad gateway</h1>", "http://a").message
        == "http://a answered with HTTP status 502"
    )


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a", "http://"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(PlanError, match="expected the address of a service"):
        Client(url)


def test_what_is_no_key_is_not_sent() -> None:
    with pytest.raises(UserError, match="not a Crucible key") as error:
        Client("http://a", "hunter2")
    assert "hunter2" not in str(error.value)


def test_nobody_there_is_told_at_once() -> None:
    with Client("http://127.0.0.1:9") as client:
        with pytest.raises(Unreachable, match=r"no answer from http://127.0.0.1:9: .*refused"):
            client.job(JOB)
        with pytest.raises(Unreachable):
            next(client.events(JOB))


def test_a_server_that_is_another_is_told(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as server,
        Client(f"{server.url}/docs") as client,
        pytest.raises(RemoteError) as error,
    ):
        client.jobs()
    assert (error.value.message, error.value.status) == ("no such path", 404)


def test_a_job_from_its_submission_to_its_report(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Client(server.url) as client:
        job = client.submit(upload(tmp_path, "succeed"), "once")
        kinds = [event.kind for event in client.events(job.id)]
        assert kinds == ["queued", "running", "stage", "stage", "succeeded"]
        assert (client.job(job.id).verdict, client.report(job.id).verdict) == (
            "accepted",
            "accepted",
        )
        assert client.submit(upload(tmp_path, "succeed")).id == job.id
        last = list(client.events(job.id))[-1]
        assert list(client.events(job.id, last.seq)) == []
        assert list(client.events(job.id, last.seq - 1)) == [last]

        failed = client.submit(upload(tmp_path, "fail"))
        assert [event.kind for event in client.events(failed.id)][-1] == "failed"
        assert client.retry(failed.id).id != failed.id
        page = client.jobs("failed", limit=1)
        assert [client.jobs("failed", 1, page.next).jobs[0].id, page.jobs[0].state] == [
            failed.id,
            "failed",
        ]

        hanging = client.submit(upload(tmp_path, "hang"))
        assert client.cancel(hanging.id).state in ("cancelled", "cancelling")
        assert [event.kind for event in client.events(hanging.id)][-1] == "cancelled"
        with pytest.raises(RemoteError, match="has ended") as error:
            client.cancel(hanging.id)
        assert (error.value.code, error.value.status) == ("service.conflict", 409)
        with pytest.raises(RemoteError, match="no config 'digits'"):
            client.submit_config("digits")
        with pytest.raises(UserError, match=r"cannot read .*absent\.onnx"):
            client.submit(Upload(tmp_path / "absent.onnx"))


def test_events_go_on_over_a_killed_server_and_an_orderly_end(tmp_path: Path) -> None:
    history: list[Event] = []
    port = free_pair()

    def follow(events: Iterator[Event]) -> None:
        history.extend(events)

    with contextlib.ExitStack() as stack:
        with serving(tmp_path, port=port) as server:
            client = stack.enter_context(Client(server.url))
            job = client.submit(upload(tmp_path, "succeed-4"))
            events = client.events(job.id)
            history += [next(events), next(events), next(events)]
            follower = threading.Thread(target=follow, args=(events,), daemon=True)
            follower.start()
            server.process.kill()
        with serving(tmp_path, port=port) as second:
            until(lambda: history[-1].kind == "stage" and len(history) > 3)
            assert second.end() == 0
        with serving(tmp_path, port=port):
            follower.join(WITHIN_S)
            assert not follower.is_alive()
            assert history == list(client.events(job.id))
    assert [event.kind for event in history].count("running") == 3
    assert history[-1].kind == "succeeded"


def test_a_server_that_stays_away_is_given_up(tmp_path: Path) -> None:
    with serving(tmp_path) as server, Client(server.url) as client:
        events = client.events(client.submit(upload(tmp_path, "hang")).id, patience_s=0.5)
        assert next(events).kind == "queued"
        server.process.kill()
        with pytest.raises(Unreachable, match="has not answered for"):
            list(events)


def test_a_large_upload_with_a_wrong_key_ends_with_the_servers_sentence(tmp_path: Path) -> None:
    with (tmp_path / "large.onnx").open("wb") as file:
        file.truncate(300_000_000)
    database = Database(tmp_path / "crucible.db")
    key, text = Keys(database).create("k", ["infer"])
    database.close()
    with serving(tmp_path, keys_required=True) as server:
        with (
            Client(server.url, f"cru_{'0' * 10}_{'A' * 43}") as client,
            pytest.raises(RemoteError, match="not known, or was revoked") as error,
        ):
            client.submit(Upload(tmp_path / "large.onnx"))
        assert (error.value.status, error.value.code) == (401, "service.unauthorized")
        with (
            Client(server.url, text) as client,
            pytest.raises(RemoteError, match="no scope 'compile'"),
        ):
            client.submit(upload(tmp_path, "succeed"))
        until(lambda: key.prefix in server.log())  # a line is written once the answer is on its way
