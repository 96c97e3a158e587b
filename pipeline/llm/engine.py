"""The artifacts of a language model: its exported form, and an engine."""

from __future__ import annotations

from typing import Literal

from pipeline.core import Artifact, Precision, Target
from pipeline.llm.plan import LanguageCandidate

MODEL_FILE = "openvino_model.xml"  # the name that GenAI looks for
PROPERTIES_FILE = "openvino_properties.json"  # with which it is to be opened
TOKENIZER_FILE, DETOKENIZER_FILE = "openvino_tokenizer.xml", "openvino_detokenizer.xml"
BASELINE = "transformers fp32"


class ExportedModel(Artifact):
    """The model as OpenVINO's IR in fp16, beside its tokenizer."""

    largest_weight: float  # the largest absolute value


class LanguageEngine(Artifact):
    """A folder that a library opens. `recipe` says how it was made."""

    library: Literal["openvino_genai", "transformers"]
    recipe: LanguageCandidate | None  # None: the model in transformers, as its source has it
    target: Target
    weight_bytes: int

    @property
    def label(self) -> str:
        return self.recipe.label if self.recipe else BASELINE

    @property
    def precision(self) -> Precision:
        """Return the precision of most weights, for the live display."""
        weights = self.recipe.weights if self.recipe else "fp32"
        known = {"fp16": Precision.FP16, "int8": Precision.INT8, "fp32": Precision.FP32}
        return known.get(weights, Precision.INT4)

    @property
    def is_on_gpu(self) -> bool:
        return False

    def properties(self, threads: int = 0) -> dict[str, str]:
        """Return OpenVINO's properties, the same for scoring, measuring and serving."""
        if self.recipe is None:
            return {}
        chosen: dict[str, str] = {"KV_CACHE_PRECISION": self.recipe.kv_cache}
        if self.recipe.arithmetic != "auto":
            chosen["INFERENCE_PRECISION_HINT"] = self.recipe.arithmetic
            if self.recipe.arithmetic == "f32":  # else activations are quantised on the way
                chosen["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
        if threads:
            chosen["INFERENCE_NUM_THREADS"] = str(threads)
        return chosen
