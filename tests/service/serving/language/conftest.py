"""The engine that these tests share."""

import pytest

from tests.service.serving.language.models import Tiny, tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    for package in ("openvino_genai", "openvino_tokenizers", "gguf", "accelerate", "nncf"):
        pytest.importorskip(package, reason=f"language models: no {package}")
    return tiny_model(tmp_path_factory.mktemp("tiny"))
