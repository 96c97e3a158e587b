"""One server with one compile of ResNet-50, for all tests of the service on a GPU."""

from collections.abc import Iterator

import pytest

from tests.gpu.fixtures.serving import Kind, Site


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site.running(tmp_path_factory.mktemp("site"), Kind()) as site:
        yield site
