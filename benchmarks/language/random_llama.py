"""A Llama of 1.1 billion random weights, in the form of Hugging Face, whose speed alone counts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.pipeline.llm.models import trained_tokenizer

SHAPE = {  # that of TinyLlama
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_random_llama(folder: Path) -> Path:
    """Write the model in fp16 (2.2 GB) unless it is there, and return its folder.

    The tokenizer is a small one: prompts are random tokens.
    """
    if folder.is_dir():
        return folder
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        model.save_pretrained(work)
        trained_tokenizer().save_pretrained(work)
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return folder
