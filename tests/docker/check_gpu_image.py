"""`make image-test-gpu`: Dockerfile.gpu is built whole, with TensorRT's libraries from the folder
that CRUCIBLE_TENSORRT names (docker/fetch_tensorrt.sh fills it). It needs no GPU, and 40 GB of
disk.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.fixtures_image import Container, Image, Images, gpu_recipe, lacking, running
from tests.docker.gpu_image import LOAD, outcome, upload

LIBRARIES = os.environ.get("CRUCIBLE_TENSORRT", "")
pytestmark = pytest.mark.skipif(
    bool(lacking()) or not LIBRARIES,
    reason=f"the image is not tested here: {lacking() or 'no folder in CRUCIBLE_TENSORRT'}",
)


@pytest.fixture(scope="module")
def image(builder: Images) -> Image:
    start = time.monotonic()
    image = builder.build(gpu_recipe(Path(LIBRARIES), "[torch,modelopt]"), "crucible:gpu")
    minutes = (time.monotonic() - start) / 60
    print(f"\nbuilt in {minutes:.1f} min, {image.size_bytes / 10**9:.1f} GB unpacked")
    return image


@pytest.fixture(scope="module")
def container(
    image: Image, key: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Container]:
    place = tmp_path_factory.mktemp("gpu-volume")
    with running(image, place / "home", key, place / "view") as container:
        print(f"\nready after {container.ready_s:.1f} s")
        yield container


def test_tensorrt_loads_in_one_version_with_its_builder_resource(container: Container) -> None:
    code = LOAD.format(
        "import ctypes; print(load().__version__);"
        " ctypes.CDLL('libnvinfer_builder_resource.so.10.6.0')"
    )
    loaded = container.run("python", "-c", code)
    assert loaded.stdout.startswith("10.6.0"), loaded.stderr


def test_torch_and_modelopt_are_those_of_a_gpu(container: Container) -> None:
    loaded = container.run(
        "python", "-c", "import torch, modelopt.onnx.quantization; print(torch.version.cuda)"
    )
    assert loaded.stdout.startswith("13."), loaded.stderr


def test_it_compiles_for_the_cpu(container: Container, key: Path, tmp_path: Path) -> None:
    last = outcome(container, key, upload(tmp_path, "onnxruntime"))
    assert last["kind"] == "succeeded", last


def test_a_compile_for_the_gpu_is_refused_without_one(
    container: Container, key: Path, tmp_path: Path
) -> None:
    last = outcome(container, key, upload(tmp_path, "tensorrt"))
    assert (last["kind"], last["code"]) == ("failed", "backend.unavailable"), last
