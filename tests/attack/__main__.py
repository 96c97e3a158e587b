"""Attack a fresh server from outside and print a table: `python -m tests.attack [--quick]`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from tests.attack.attacks import ATTACKS
from tests.attack.record import Attack, Outcome, in_page, make, table_of
from tests.attack.targets import Targets

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "attacks.md"


def main(words: Sequence[str]) -> int:
    """Return 1 if the server fell to an attack."""
    options = _options(words)
    selection = [
        attack
        for attack in ATTACKS
        if (not options.only or attack.name in options.only) and not (options.quick and attack.slow)
    ]
    if options.list:
        for attack in selection:
            print(f"{attack.name}: {attack.run.__doc__}")
        return 0
    outcomes = attacked(selection)
    print(table_of(outcomes))
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    if options.docs:
        PAGE.write_text(in_page(PAGE.read_text(), table_of(outcomes)))
    return int(any(outcome.verdict == "FELL" for outcome in outcomes))


def attacked(selection: Sequence[Attack]) -> list[Outcome]:
    """Run the attacks against servers of their own, and return how they ended."""
    outcomes = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as resources:
        targets = Targets(Path(folder), resources)
        for attack in selection:
            begin = time.monotonic()
            outcomes.append(make(attack, targets))
            took_s = time.monotonic() - begin
            print(f"{attack.name}: {outcomes[-1].verdict}, {took_s:.1f} s", file=sys.stderr)
    return outcomes


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.attack", description=__doc__)
    names = [attack.name for attack in ATTACKS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="leave out the slow attacks")
    parser.add_argument("--list", action="store_true", help="describe the attacks, and run none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes")
    parser.add_argument("--docs", action="store_true", help=f"write the table of {PAGE.name}")
    options = parser.parse_args(words)
    if options.docs and (options.only or options.quick):
        parser.error("--docs writes all attacks, leave out --only and --quick")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
