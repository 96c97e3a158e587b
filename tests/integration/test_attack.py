"""The attacks of `make attack`: the quick ones run here, and the page lists all of them."""

import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.attack.__main__ import PAGE
from tests.attack.attacks import ATTACKS
from tests.attack.record import Attack, Fell, NotRun, Outcome, in_page, make, table_of
from tests.attack.targets import Targets

QUICK = [attack for attack in ATTACKS if not attack.slow]


class QuietTargets:
    """Servers that nothing has damaged."""

    def damage(self) -> str:
        return ""


class DamagedTargets:
    def damage(self) -> str:
        return "the server ended"


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Targets]:
    with ExitStack() as resources:
        yield Targets(tmp_path_factory.mktemp("targets"), resources)


@pytest.mark.parametrize("attack", QUICK, ids=lambda attack: attack.name)
def test_the_server_holds(targets: Targets, attack: Attack) -> None:
    outcome = make(attack, targets)
    if outcome.verdict == "not run":
        pytest.skip(outcome.happened)
    assert outcome.verdict == "held", outcome.happened


def test_the_page_lists_exactly_the_attacks() -> None:
    row = r"^\| ([\w-]+) \| (.*?) \| .* \| (?:held|FELL|not run) \|$"
    rows = re.findall(row, PAGE.read_text(), re.MULTILINE)
    assert rows == [(attack.name, attack.promise) for attack in ATTACKS]


def test_each_attack_has_a_name_of_its_own_and_one_sentence() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    for attack in ATTACKS:
        assert re.fullmatch(r"[A-Z][^\n]*\.", attack.run.__doc__ or ""), attack.name


def ends(run: object, targets: object = None) -> Outcome:
    """How an attack ends that does this."""
    return make(Attack("a", "it holds", run), targets or QuietTargets())  # type: ignore[arg-type]


def raises(error: Exception) -> object:
    def run(targets: Targets) -> str:
        raise error

    return run


def test_how_an_attack_can_end() -> None:
    assert ends(lambda _: "422") == Outcome("a", "it holds", "422", "held")
    assert ends(raises(Fell("200"))) == Outcome("a", "it holds", "200", "FELL")
    assert ends(raises(NotRun("no root"))) == Outcome("a", "it holds", "no root", "not run")
    assert ends(raises(KeyError("x"))) == Outcome("a", "it holds", "KeyError: 'x'", "FELL")
    died = ends(lambda _: "422", DamagedTargets())
    assert died == Outcome("a", "it holds", "422; the server ended", "FELL")


def test_a_table_replaces_that_of_the_page() -> None:
    old, new = (table_of([Outcome("a", "b", text, "held")]) for text in ("one|two", "three"))
    assert old.splitlines()[-1] == "| a | b | one/two | held |"
    assert in_page(f"# Page\n\n{old}\n\nEnd\n", new) == f"# Page\n\n{new}\n\nEnd\n"
