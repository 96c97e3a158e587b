"""All targets, by name."""

from tests.fuzz.application import APPLICATION
from tests.fuzz.parsers import PARSERS

TARGETS = {target.name: target for target in (*PARSERS, *APPLICATION)}
