"""`make image-test`, second part: Dockerfile.gpu is built, with stubs in the place of TensorRT's
libraries and without PyTorch. It compiles for the CPU, and says why not for the GPU.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.fixtures_image import Container, Image, Images, gpu_recipe, lacking, running
from tests.docker.gpu_image import LOAD, outcome, upload

pytestmark = pytest.mark.skipif(
    bool(lacking()), reason=f"the image is not tested here: {lacking()}"
)


@pytest.fixture(scope="module")
def image(builder: Images, tmp_path_factory: pytest.TempPathFactory) -> Image:
    stubs = tmp_path_factory.mktemp("tensorrt")
    for name in ("libnvinfer.so.10", "libnvinfer_plugin.so.10", "libnvonnxparser.so.10"):
        (stubs / name).write_text("a stub")
    image = builder.build(gpu_recipe(stubs, extras=""), "crucible:gpu-stub")
    print(f"\nthe GPU image has {image.size_bytes / 10**6:.0f} MB without PyTorch and TensorRT")
    return image


@pytest.fixture(scope="module")
def container(
    image: Image, key: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Container]:
    place = tmp_path_factory.mktemp("gpu-volume")
    with running(image, place / "home", key, place / "view") as container:
        yield container


def test_libraries_of_the_named_context_are_where_the_linker_looks(image: Image) -> None:
    (folder,) = image.root.glob("opt/crucible/lib/python3*/site-packages/tensorrt_libs")
    assert (folder / "libnvinfer.so.10").read_text() == "a stub"
    configured = (image.root / "etc/ld.so.conf.d/tensorrt.conf").read_text()
    assert configured == f"/{folder.relative_to(image.root)}\n"
    versions = {
        each.name.partition("-")[2] for each in folder.parent.glob("tensorrt_cu12_*.dist-info")
    }
    assert len(versions) == 1  # of the libraries and of their bindings


def test_libraries_that_are_stubs_are_named(container: Container) -> None:
    loaded = container.run("python", "-c", LOAD.format("load()"))
    error, _ = loaded.stderr.splitlines()[-2:]  # and the next step
    assert "BackendUnavailable: TensorRT is installed and cannot be loaded: " in error
    assert error.endswith("/tensorrt_libs/libnvinfer.so.10: file too short")


def test_a_compile_for_the_gpu_is_refused_in_one_sentence(
    container: Container, key: Path, tmp_path: Path
) -> None:
    last = outcome(container, key, upload(tmp_path, "tensorrt"))
    assert (last["kind"], last["code"]) == ("failed", "backend.unavailable"), last


def test_it_compiles_for_the_cpu(container: Container, key: Path, tmp_path: Path) -> None:
    last = outcome(container, key, upload(tmp_path, "onnxruntime"))
    assert last["kind"] == "succeeded", last
