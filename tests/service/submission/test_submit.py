from __future__ import annotations

import pytest

from service.errors import Unprocessable
from service.sandbox.proof import Act, Proof
from service.submission.submit import check_sandbox

HELD = Act(name="read another job", error="Permission denied")


def test_code_is_refused_unless_every_act_failed() -> None:
    check_sandbox(Proof(layers=(), acts=(HELD,)))
    fell = Act(name="signal the server", error="")
    with pytest.raises(Unprocessable, match="code in it could signal the server"):
        check_sandbox(Proof(layers=(), acts=(HELD, fell)))
    with pytest.raises(Unprocessable, match="does not hold: no process"):
        check_sandbox(Proof(layers=(), acts=(), fault="no process"))
