"""Who may use /v1, and what the service writes down of it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from tests.service.builders.jobs import WITHIN_S
from tests.service.builders.serving import serving_models
from tests.service.builders.tensors import key_of
from tests.service.http.openai.streams import fault_of
from tests.service.integration.test_server import Server, until

SECRET = "purple-elephant"


def send(server: Server, key: str = "", **body: Any) -> httpx.Response:
    head = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": "capitals", "prompt": SECRET, **body}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=head, timeout=WITHIN_S)


def test_a_key_with_the_scope_infer_is_needed_and_sees_the_models_of_its_owner(
    tmp_path: Path,
) -> None:
    with serving_models(tmp_path, models="add", keys_required="true") as server:
        infer = key_of(tmp_path, "infer", owner="local")
        other = key_of(tmp_path, "infer", owner="other")
        compiles = key_of(tmp_path, "compile", owner="local")
        assert send(server, infer).json()["choices"][0]["text"] == SECRET.upper()
        for key, status, kind, code in (
            ("", 401, "authentication_error", "invalid_api_key"),
            ("crucible-wrong", 401, "authentication_error", "invalid_api_key"),
            (compiles, 403, "permission_error", "service.forbidden"),
            (other, 404, "invalid_request_error", "model_not_found"),
        ):
            refused, fault = fault_of(send(server, key))
            assert (refused, fault["type"], fault["code"]) == (status, kind, code)
        assert "`--scope infer`" in fault_of(send(server, compiles))[1]["message"]
        url, head = f"{server.url}/v1/models", {"Authorization": f"Bearer {infer}"}
        names = {each["id"] for each in httpx.get(url, headers=head).json()["data"]}
        assert "capitals" in names
        assert "foreign" not in names
        assert fault_of(httpx.get(f"{url}/foreign", headers=head))[0] == 404


def test_a_key_over_its_rate_is_refused_in_the_same_form(tmp_path: Path) -> None:
    with serving_models(
        tmp_path, models="add", keys_required="true", max_requests_per_s=1
    ) as server:
        key = key_of(tmp_path, "infer", owner="local")
        refused = next(
            answer for _ in range(100) if (answer := send(server, key)).status_code != 200
        )
        status, fault = fault_of(refused)
        assert (status, fault["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["Retry-After"] == "1"


def test_no_text_of_a_request_is_logged_or_audited(tmp_path: Path) -> None:
    with serving_models(tmp_path, models="add") as server:
        assert send(server).status_code == 200
        assert send(server, stop=[SECRET] * 5).status_code == 400
        assert send(server, model="lost", stream=True).status_code == 200
        assert send(server, model="lost").status_code == 503
        assert send(server, model="fails").status_code == 500
        until(lambda: server.log().count('"event": "request"') >= 5)
        written = server.log()
        assert server.end() == 0
    assert '"path": "/v1/completions"' in written
    assert SECRET not in written
    assert SECRET.upper() not in written
    with closing(sqlite3.connect(tmp_path / "crucible.db")) as rows:
        assert SECRET not in "\n".join(rows.iterdump())


def test_a_key_over_its_tokens_waits_and_others_do_not(tmp_path: Path) -> None:
    limit = 60
    with serving_models(
        tmp_path, models="add", keys_required="true", max_tokens_per_minute=limit
    ) as server:
        one, other = (key_of(tmp_path, "infer", owner="local") for _ in range(2))

        def used(key: str) -> tuple[int, int]:
            head = {"Authorization": f"Bearer {key}"}
            rows = httpx.get(f"{server.url}/limits", headers=head).json()["limits"]
            (row,) = [row for row in rows if row["setting"] == "max_tokens_per_minute"]
            return row["used"], row["limit"]

        prompt = "a" * 19  # 20 tokens
        assert send(server, one, prompt=prompt, max_tokens=10).status_code == 200
        assert used(one) == (30, limit)
        greedy = send(server, one, prompt=prompt, max_tokens=50)
        status, fault = fault_of(greedy)
        assert (status, fault["code"]) == (429, "rate_limit_exceeded")
        assert 0 < int(greedy.headers["Retry-After"]) <= 61
        assert "and this request may use 70 more" in fault["message"]
        broken = send(server, one, model="lost", prompt="abc", max_tokens=20)
        assert broken.status_code == 503
        assert used(one) == (36, limit), "what came before the error counts, and no more"
        assert send(server, one, prompt="a" * 13, max_tokens=10).status_code == 200
        assert used(one) == (limit, limit)
        for streamed in (False, True):
            assert send(server, one, prompt="a", max_tokens=1, stream=streamed).status_code == 429
        assert used(other) == (0, limit)
        assert send(server, other, prompt=prompt).status_code == 200
