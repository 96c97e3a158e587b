"""What the image tests share: buildah's folder, in which the images use one base and the packages
that pip has fetched for another; and an admin key.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.fixtures_image import Images, images
from tests.service.integration.test_docs import SHELL, container_commands


@pytest.fixture(scope="session")
def builder() -> Iterator[Images]:
    with images() as builder:
        yield builder


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as the page makes it: the user of the image reads it, and its folder is closed."""
    folder = tmp_path_factory.mktemp("key")
    before, _ = container_commands()
    subprocess.run(["bash", "-c", "\n".join([SHELL, *before])], cwd=folder, check=True)
    return folder / "keys" / "admin.key"
