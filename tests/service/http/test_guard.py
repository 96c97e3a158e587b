"""The gate: who comes in, and that nothing of a refused body is read."""

import asyncio
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from service.auth import LOCAL, Caller, Source, Verify
from service.bytes_in_flight import BytesInFlight
from service.errors import Forbidden
from service.http.guard import UPLOAD_MEMORY_BYTES, Application, Guard, Receive, Send
from service.settings import GIB, Settings
from service.storage.database import Database
from service.storage.key import Key
from service.storage.keys import Keys


class Inside:
    """An application that reads the whole body."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self.callers.append(scope["state"]["caller"])
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"in"})


class Exchange:
    """One request as a server would hand it in; counts what is read of it."""

    def __init__(
        self,
        guard: Guard,
        method: str = "GET",
        path: str = "/jobs",
        chunks: tuple[bytes, ...] = (b"",),
        **headers: str,
    ) -> None:
        named = {
            "host": "localhost:8000",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(n.encode(), v.encode("latin-1")) for n, v in named.items()],
        }
        self.read = 0
        self.sent: list[MutableMapping[str, Any]] = []
        waiting = list(chunks)

        async def receive() -> MutableMapping[str, Any]:
            self.read += 1
            return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

        async def send(message: MutableMapping[str, Any]) -> None:
            self.sent.append(message)

        asyncio.run(guard(scope, receive, send))
        self.state = scope["state"]
        self.status = self.sent[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}
        self.body = b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def error(self) -> str:
        return str(orjson.loads(self.body)["error"])


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(Database(tmp_path / "crucible.db"))


@pytest.fixture
def inside() -> Inside:
    return Inside()


def verifier(keys: Keys) -> Verify:
    async def verify(text: str, source: Source) -> Key:
        return keys.verify(text)

    return verify


async def no_session(token: str, source: Source) -> Key | None:
    return None


def open_guard(
    inside: Application, keys: Keys, budget: BytesInFlight | None = None, **settings: Any
) -> Guard:
    options = Settings(home=Path("/nowhere"), **settings)
    share = budget or BytesInFlight(GIB)
    return Guard(inside, options, verifier(keys), no_session, share)


def test_on_loopback_everyone_is_the_local_user(inside: Inside, keys: Keys) -> None:
    exchange = Exchange(open_guard(inside, keys), x_request_id="abc-1")
    assert (exchange.status, exchange.body, inside.callers) == (200, b"in", [LOCAL])
    assert exchange.headers["x-request-id"] == "abc-1"
    assert LOCAL.sees is None


def test_a_key_makes_the_caller(inside: Inside, keys: Keys) -> None:
    key, text = keys.create("k", ["compile"])
    exchange = Exchange(
        open_guard(inside, keys, keys_required=True), authorization=f"Bearer {text}"
    )
    assert exchange.status == 200
    assert inside.callers == [Caller(key.owner, ("compile",), key.prefix)]
    assert inside.callers[0].sees == key.owner
    inside.callers[0].require("compile")
    with pytest.raises(Forbidden, match="no scope 'admin', it has compile"):
        inside.callers[0].require("admin")


@pytest.mark.parametrize(
    "credentials", ["", "Bearer", "Bearer cru_0000000000_" + "A" * 43, "Basic dTpw", "Bearer é"]
)
def test_without_a_good_key_nothing_of_the_body_is_read(
    inside: Inside, keys: Keys, credentials: str
) -> None:
    guard = open_guard(inside, keys, keys_required=True)
    exchange = Exchange(
        guard,
        "POST",
        "/compile",
        (b"x" * 1000,),
        content_length="1000",
        **({"authorization": credentials} if credentials else {}),
    )
    assert (exchange.status, exchange.read, inside.bodies) == (401, 0, [])
    assert exchange.headers["www-authenticate"] == "Bearer"
    assert exchange.headers["connection"] == "close"
    assert "key" in exchange.error


REFUSALS: list[tuple[dict[str, str], int]] = [
    ({}, 401),
    ({"host": "evil.example"}, 421),
    ({"origin": "http://evil.example"}, 403),
    ({"content_length": "x"}, 413),
]


@pytest.mark.parametrize(("headers", "status"), REFUSALS)
def test_a_refused_request_has_its_id_in_the_log_too(
    inside: Inside,
    keys: Keys,
    headers: dict[str, Any],
    status: int,
) -> None:
    """Which `observe` reads from the state, for the client got the same id."""
    guard = open_guard(inside, keys, keys_required=status == 401)
    for extra in ({}, {"x_request_id": "mine"}):
        exchange = Exchange(guard, "POST", "/compile", **(headers | extra))
        assert (exchange.status, inside.bodies) == (status, [])
        assert exchange.state["request_id"] == exchange.headers["x-request-id"]


@pytest.mark.parametrize(
    "path", ["/healthz", "/readyz", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready"]
)
def test_what_holds_no_secret_needs_no_key(inside: Inside, keys: Keys, path: str) -> None:
    assert Exchange(open_guard(inside, keys, keys_required=True), path=path).status == 200
    assert inside.callers[0].scopes == ()


@pytest.mark.parametrize(
    "host", ["evil.example", "", "localhost.evil.example", "127.0.0.1.nip.io:8000"]
)
def test_another_name_is_not_answered_to(inside: Inside, keys: Keys, host: str) -> None:
    exchange = Exchange(open_guard(inside, keys), host=host)
    assert (exchange.status, inside.callers) == (421, [])


@pytest.mark.parametrize("path", ["/jobs", "/healthz"])
def test_several_hosts_are_refused(inside: Inside, keys: Keys, path: str) -> None:
    exchange = Exchange(open_guard(inside, keys), path=path, Host="localhost:8000")
    assert (exchange.status, exchange.error) == (400, "2 Host headers, expected one")
    assert inside.callers == []


def test_a_name_of_the_list_is_answered_to(inside: Inside, keys: Keys) -> None:
    assert (
        Exchange(
            open_guard(inside, keys, allowed_hosts=("models.example",)), host="Models.example:443"
        ).status
        == 200
    )


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost:8000"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "http://localhost:9999"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-origin"}, 200),
    ],
)
def test_a_page_from_elsewhere_changes_nothing_also_on_loopback(
    inside: Inside, keys: Keys, headers: dict[str, Any], status: int
) -> None:
    assert Exchange(open_guard(inside, keys), "POST", "/compile", **headers).status == status
    assert Exchange(open_guard(inside, keys), "GET", "/jobs", **headers).status == 200


@pytest.mark.parametrize("length", ["11", "99999999999999", "-1", "ten", "²", "0" * 5000 + "3"])
def test_a_body_that_says_it_is_too_long_is_not_read(
    inside: Inside, keys: Keys, length: str
) -> None:
    exchange = Exchange(
        open_guard(inside, keys, max_body_bytes=10),
        "POST",
        "/jobs",
        (b"x" * 11,),
        content_length=length,
    )
    assert (exchange.status, exchange.read) == (413, 0)


def test_a_body_that_turns_out_too_long_is_cut(inside: Inside, keys: Keys) -> None:
    exchange = Exchange(
        open_guard(inside, keys, max_body_bytes=10), "POST", "/jobs", (b"x" * 6, b"x" * 6, b"x" * 6)
    )
    assert (exchange.status, exchange.read) == (413, 2)
    assert "more than 10 bytes" in exchange.error
    assert len(exchange.sent) == 2  # the application's own answer is not sent as well


def test_what_is_answered_before_its_body_has_come_closes_the_connection(keys: Keys) -> None:
    async def hasty(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        for _ in range(reads):
            await receive()
        await send({"type": "http.response.start", "status": 422, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = open_guard(hasty, keys)
    for reads, headers, closed in (
        (0, {"content_length": "12"}, True),
        (1, {"content_length": "12"}, True),
        (2, {"content_length": "12"}, False),
        (1, {"transfer_encoding": "chunked"}, True),
        (0, {}, False),
    ):
        exchange = Exchange(guard, "POST", "/compile", (b"x" * 6, b"x" * 6), **headers)
        assert ("connection" in exchange.headers) == closed, (reads, headers)


def test_uploads_have_a_limit_of_their_own(inside: Inside, keys: Keys) -> None:
    guard = open_guard(inside, keys, max_body_bytes=10, max_upload_bytes=100)
    assert Exchange(guard, "POST", "/compile", (b"x" * 50,), content_length="50").status == 200
    assert Exchange(guard, "POST", "/compile", (b"x" * 101,)).status == 413


@pytest.mark.parametrize(
    "path", ["/infer", "/models/m/infer", "/v2/models/m/infer", "/v2/models/m/versions/1/infer"]
)
def test_tensors_have_a_limit_of_their_own(inside: Inside, keys: Keys, path: str) -> None:
    guard = open_guard(inside, keys, max_body_bytes=10, max_infer_bytes=100)
    assert Exchange(guard, "POST", path, (b"x" * 50,), content_length="50").status == 200
    assert Exchange(guard, "POST", path, (b"x" * 60, b"x" * 60)).status == 413


def test_a_body_that_does_not_fit_beside_the_others_is_not_read(inside: Inside, keys: Keys) -> None:
    budget = BytesInFlight(100)
    guard = open_guard(inside, keys, budget)
    with budget.share() as others:
        others.grow(60)
        exchange = Exchange(guard, "POST", "/infer", (b"x" * 41,), content_length="41")
        assert (exchange.status, exchange.read, inside.bodies) == (503, 0, [])
        assert exchange.headers["retry-after"] == "5"
        assert exchange.headers["connection"] == "close"
        assert Exchange(guard, path="/healthz").status == 200
        assert Exchange(guard, "POST", "/infer", (b"x" * 40,), content_length="40").status == 200
        assert budget.held == 60
    assert Exchange(guard, "POST", "/infer", (b"x" * 41,), content_length="41").status == 200
    assert budget.held == 0


def test_a_body_of_unknown_length_is_cut_when_it_does_not_fit(inside: Inside, keys: Keys) -> None:
    budget = BytesInFlight(100)
    guard = open_guard(inside, keys, budget)
    pieces = (b"x" * 60, b"x" * 60, b"x" * 60)
    exchange = Exchange(guard, "POST", "/infer", pieces, transfer_encoding="chunked")
    assert (exchange.status, exchange.read, len(exchange.sent)) == (503, 2, 2)
    assert "more than 100 bytes together" in exchange.error
    assert budget.held == 0


@pytest.mark.parametrize(
    "headers", [{"content_length": str(GIB)}, {"transfer_encoding": "chunked"}]
)
def test_an_upload_counts_only_what_is_in_memory(keys: Keys, headers: dict[str, Any]) -> None:
    held: list[int] = []

    async def look(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        for _ in range(2):
            await receive()
            held.append(budget.held)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    budget = BytesInFlight(UPLOAD_MEMORY_BYTES)
    guard = open_guard(look, keys, budget)
    pieces = (b"x" * UPLOAD_MEMORY_BYTES,) * 2
    assert Exchange(guard, "POST", "/compile", pieces, **headers).status == 200
    assert held == [UPLOAD_MEMORY_BYTES] * 2
    assert budget.held == 0
