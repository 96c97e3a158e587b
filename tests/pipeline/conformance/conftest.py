"""Engines of the conformance suite: each case is built once per backend, for on a GPU a build takes
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache

import pytest

from pipeline import backends
from pipeline.core.artifacts import Engine
from pipeline.errors import BackendUnavailable, UnsupportedError
from tests.pipeline.conformance.engines import GRAPH_BACKENDS, EngineOf, Open, build
from tests.pipeline.conformance.models import CASES, several


@pytest.fixture(scope="session")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> EngineOf:
    """The engine of a case; it is shared, so that whoever changes its files works on a copy."""
    cases = {case.name: case for case in CASES}

    @cache
    def once(backend: str, name: str) -> Engine:
        return build(backend, cases[name], tmp_path_factory.mktemp("conformance") / "engine")

    return lambda backend, case: once(backend, case.name)


@pytest.fixture(scope="session")
def obstacle(engine_of: EngineOf) -> Callable[[str], str]:
    """Why no engine of a backend runs here; empty if one does."""

    @cache
    def why(backend: str) -> str:
        try:
            backends.load(engine_of(backend, several())).close()
        except (BackendUnavailable, UnsupportedError) as error:
            return error.message
        return ""

    return why


@pytest.fixture(params=GRAPH_BACKENDS)
def backend(request: pytest.FixtureRequest, obstacle: Callable[[str], str]) -> str:
    name: str = request.param
    if why := obstacle(name):
        pytest.skip(f"{name}: {why}")
    return name


@pytest.fixture
def load(backend: str, engine_of: EngineOf) -> Iterator[Open]:
    """Loads the engine of a case, and closes it after the test."""
    with ExitStack() as stack:
        yield lambda case: stack.enter_context(closing(backends.load(engine_of(backend, case))))
