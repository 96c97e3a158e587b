"""The artifacts of a language model: its exported form, and an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipeline.core.artifacts import Artifact, Target
from pipeline.core.frozen import Frozen
from pipeline.core.recipe import Precision
from pipeline.errors import DamagedError
from pipeline.llm.plan import Device, LanguageCandidate, LibraryName

MODEL_FILE = "openvino_model.xml"  # the name that GenAI looks for
PROPERTIES_FILE = "openvino_properties.json"  # with which it is to be opened
TOKENIZER_FILE, DETOKENIZER_FILE = "openvino_tokenizer.xml", "openvino_detokenizer.xml"
SETTINGS_FILE = "language.json"  # what a server needs besides the graphs
MAX_SETTINGS_BYTES = 2**20
BASELINE = "transformers fp32"
GPU_BASELINE = "transformers bf16"  # as its users open it on a GPU

ACTIVATION_GROUP = 64
"""Activations that share a scale, with `arithmetic: int8`. Of SmolLM2 in int8, one thread makes a
token in 19 ms of CPU time with 64, 24.6 with 32, 20 with 192, and in 29 ms with bf16.
"""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
SpecialText = Annotated[str, Field(max_length=200)]


class LanguageSettings(Frozen):
    """What the files of a model say of its tokens. Serving needs it, and the graphs lack it."""

    end_tokens: Annotated[tuple[TokenId, ...], Field(max_length=100)]  # each ends an answer
    special_tokens: dict[str, SpecialText] = Field(max_length=100)  # by role, as "bos_token"
    chat_template: str = ""  # Jinja; empty: the model has none
    context: int = Field(ge=1, lt=2**31)  # the longest text for which it was trained
    vocabulary: int = Field(ge=1, lt=2**31)  # number of tokens
    cache_values_per_token: int = Field(ge=1, lt=2**40)  # of keys and values, in all layers


def read_settings(folder: Path) -> LanguageSettings:
    """Read the settings of an engine's folder. DamagedError if they are missing or no settings."""
    file = folder / SETTINGS_FILE
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_SETTINGS_BYTES + 1)
        if len(text) > MAX_SETTINGS_BYTES:
            raise ValueError(f"expected at most {MAX_SETTINGS_BYTES} bytes")
        return LanguageSettings.model_validate_json(text)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise DamagedError(
            f"'{SETTINGS_FILE}' of the language model cannot be read: {reason}",
            "compile the model again",
        ) from error


class ExportedModel(Artifact):
    """What the candidates of a library share: of OpenVINO the IR in fp16, and always the tokenizer
    and the settings.
    """

    largest_weight: float  # the largest absolute value
    device: Device = "cpu"


class LanguageEngine(Artifact):
    """A folder that a library opens. `recipe` says how it was made."""

    library: LibraryName | Literal["transformers"] = Field(description="What opens it.")
    recipe: LanguageCandidate | None = Field(
        description="How it was made. null: the model in transformers, as its source has it."
    )
    target: Target
    weight_bytes: int = Field(description="Size of its weights.")

    @property
    def label(self) -> str:
        if self.recipe:
            return self.recipe.label
        return GPU_BASELINE if self.is_on_gpu else BASELINE

    @property
    def precision(self) -> Precision:
        """Return the precision of most weights, for the live display."""
        weights = self.recipe.weights if self.recipe else self.label.split()[-1]
        known = {
            "fp32": Precision.FP32,
            "fp16": Precision.FP16,
            "bf16": Precision.BF16,
            "int8": Precision.INT8,
            "fp8": Precision.FP8,
        }
        return known.get(weights, Precision.INT4)

    @property
    def is_on_gpu(self) -> bool:
        return self.target.compute_capability is not None

    @property
    def cache_value_bytes(self) -> float:
        """Return the bytes of a cached value. 8-bit ones have a scale and a zero point of 4 bytes
        for each head, which has 32 values or more.
        """
        formats = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "u8": 1.25}
        return formats[self.recipe.kv_cache] if self.recipe else 4.0

    def properties(self, threads: int = 0) -> dict[str, str]:
        """Return OpenVINO's properties, the same for scoring, measuring and serving."""
        if self.recipe is None or self.library != "openvino_genai":
            return {}
        chosen: dict[str, str] = {"KV_CACHE_PRECISION": self.recipe.kv_cache}
        if self.recipe.arithmetic == "int8":  # OpenVINO quantises activations that are in f32
            chosen["INFERENCE_PRECISION_HINT"] = "f32"
            chosen["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = str(ACTIVATION_GROUP)
        elif self.recipe.arithmetic != "auto":
            chosen["INFERENCE_PRECISION_HINT"] = self.recipe.arithmetic
            if self.recipe.arithmetic == "f32":  # else activations are quantised on the way
                chosen["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
        if threads:
            chosen["INFERENCE_NUM_THREADS"] = str(threads)
        return chosen
