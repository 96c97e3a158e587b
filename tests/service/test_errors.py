"""Every refusal has the same form; what is our own bug tells nothing of itself."""

import pytest

from pipeline.errors import BackendUnavailable, DiskFull, InternalError, ModelError, PlanError
from service.errors import NotFound, TooMany, Unauthorized, answer_to


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Unauthorized("no key", "send one"), 401, "service.unauthorized"),
        (NotFound("no job"), 404, "service.not_found"),
        (TooMany("full", retry_after_s=7), 429, "service.too_many"),
        (PlanError("bad", "mend"), 422, "plan.invalid"),
        (ModelError("bad"), 422, "model.invalid"),
        (DiskFull("full"), 507, "host.disk_full"),
        (BackendUnavailable("none"), 503, "backend.unavailable"),
    ],
)
def test_each_error_has_its_status_and_one_form(error: Exception, status: int, code: str) -> None:
    answer = answer_to(error)
    assert (answer.status, answer.body["code"]) == (status, code)
    assert answer.body["error"] == error.args[0]


def test_a_name_that_is_no_text_is_replaced_in_an_answer() -> None:
    """tarfile gives such names: half of a surrogate pair stands for a byte that is not UTF-8."""
    answer = answer_to(PlanError("'\udcff' is a link", "send \udcff"))
    assert (answer.body["error"], answer.body["next"]) == ("'?' is a link", "send ?")
    assert answer.json


def test_headers_say_what_to_do() -> None:
    assert answer_to(TooMany("full", retry_after_s=7)).headers == {"Retry-After": "7"}
    assert answer_to(Unauthorized("no")).headers == {"WWW-Authenticate": "Bearer"}


@pytest.mark.parametrize("error", [ValueError("secret path /x"), InternalError("secret path /x")])
def test_a_bug_is_not_told_to_clients(error: Exception) -> None:
    answer = answer_to(error, "req-1")
    assert answer.status == 500
    assert "secret" not in str(answer.body)
    assert "req-1" in answer.body["error"]
