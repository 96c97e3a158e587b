"""A tiny BERT with random weights, and a tokenizer of whole words: an engine that serves texts."""

from __future__ import annotations

import shutil
import warnings
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import backends
from pipeline.compiler.graph import export_plan
from pipeline.core.artifacts import BuildOptions, Engine
from pipeline.core.progress import silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.plan.files import plan_from_document
from pipeline.plan.schema import Plan
from pipeline.text_inputs import TOKENIZER_FILE, check_text
from service.jobs.store import JobStore
from service.storage.database import Database
from service.storage.layout import Folders
from tests.service.serving.models import ended_job

WORDS = ["a", "the", "cat", "dog", "sleeps", "runs", "on", "sofa", "fast", "slowly"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
CLS, SEP, HIDDEN, LONGEST = 2, 3, 16, 24
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def write_tokenizer(file: Path) -> Path:
    """Write a tokenizer that by itself cuts texts and fills them up, as sentence-transformers'."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(file))
    return file


@dataclass(frozen=True)
class TinyEncoder:
    """The encoder as PyTorch has it."""

    bert: Any

    def reference(self, words: str) -> NDArray[np.float32]:
        """The mean of the hidden states of a text, of length 1."""
        import torch

        known = [*SPECIAL, *WORDS]
        ids = [known.index(word) if word in known else 1 for word in words.lower().split()]
        with torch.no_grad():
            hidden = self.bert(torch.tensor([[CLS, *ids, SEP]])).last_hidden_state[0].mean(0)
        vector: NDArray[np.float32] = (hidden / hidden.norm()).numpy()
        return vector


def tiny_encoder() -> TinyEncoder:
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LONGEST,
        initializer_range=0.5,  # so that the texts differ
    )
    return TinyEncoder(BertModel(config, add_pooling_layer=False).eval())


def plan_of(encoder: TinyEncoder, folder: Path) -> Plan:
    """Write the ONNX model and the tokenizer; return the plan over both, from 5 tokens on."""
    import torch

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = encoder.bert

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> Any:
            return self.bert(ids, mask, types).last_hidden_state

    ones = [torch.ones(2, 8, dtype=torch.int64) for _ in INPUTS]
    with warnings.catch_warnings(action="ignore"):  # that inputs share their sizes
        torch.onnx.export(
            Hidden().eval(),
            tuple(ones),
            str(folder / "tiny.onnx"),
            input_names=INPUTS,
            output_names=["hidden"],
            dynamic_shapes=tuple({0: "batch", 1: "tokens"} for _ in INPUTS),
            external_data=False,
        )
    write_tokenizer(folder / TOKENIZER_FILE)
    document = {
        "model": {"path": "tiny.onnx"},
        "profiles": [{"batch": [1, 4, 8], "tokens": [5, 8, 16]}],
        "serving": {
            "padding": [{"input": name, "axis": 1} for name in INPUTS],
            "text": {"tokenizer": ".", "pooling": "mean"},
        },
    }
    return plan_from_document(document, folder, "tiny")


def promotable(home: Path, encoder: TinyEncoder, folder: Path) -> str:
    """The id of a job of a new home that has compiled the encoder."""
    plan = plan_of(encoder, folder)
    model = export_plan(plan, Runner(Store(folder / "store")), simplified=False)
    assert plan.serving.text is not None
    check_text(plan.serving.text, model.inputs, model.outputs)
    recipe = Recipe(backend="onnxruntime", precision=Precision.FP32, realised_in="graph")
    (out := folder / "engine").mkdir()
    options = BuildOptions(profiles=plan.profiles, threads=1)
    engine: Engine = backends.backend("onnxruntime").build(model, recipe, options, out, silent)
    shutil.copy(plan.serving.text.file, engine.root)
    home.mkdir(parents=True)
    with closing(Database(home / "crucible.db")) as database:
        return ended_job(Folders(home), JobStore(database), serving=plan.serving, engine=engine)
