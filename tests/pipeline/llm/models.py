"""Small random language models, with a tokenizer trained on a page of text, as Hugging Face writes
them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PROSE = Path(__file__).parents[3] / "calibration_data" / "prose"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
VOCABULARY = 384
SCALED: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama with scaled positions": ("llama", {"rope_parameters": SCALED}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}
"""What differs between architectures, as options of `write_model`."""


def texts(count: int, name: str = "selection") -> list[str]:
    """The first texts of a set, cut to some hundred characters."""
    lines = (PROSE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"][:400] for line in lines[:count]]


def write_texts(file: Path, given: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in given), encoding="utf-8")
    return file


def write_model(folder: Path, kind: str = "llama", scale: float = 0.08, **options: Any) -> Path:
    """Write a model of this `model_type` into a folder."""
    import torch
    import transformers

    tokenizer = trained_tokenizer()
    config = transformers.AutoConfig.for_model(
        kind,
        **SIZES | options,
        vocab_size=VOCABULARY,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, scale)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0, 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trained_tokenizer() -> Any:
    """A byte-level BPE tokenizer of VOCABULARY tokens."""
    import tokenizers
    import transformers

    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<unk>", "<s>", "</s>", "<|endoftext|>"],  # the last one: Qwen adds it
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts(12), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def language_plan(folder: Path, model: Path | str, **sections: Any) -> dict[str, Any]:
    """A plan of a language model, and its texts in `folder`."""
    return {
        "language_model": {"path": str(model)},
        "texts": {
            "selection": str(write_texts(folder / "selection.jsonl", texts(6))),
            "validation": str(write_texts(folder / "validation.jsonl", texts(6, "validation"))),
            "max_tokens": 96,
            "cached_tokens": 8,
        },
        "context": 256,
        **sections,
    }
