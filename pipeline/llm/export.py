"""From the model in PyTorch to OpenVINO's IR, in fp16.

GenAI makes the graph from a GGUF file, so the weights are written as one in fp16 first. Its own
reading of quantised files is not used: of Q4_1 it rounds the minimum of each group to a whole
number of steps. The frequencies of the positions come from the module, since GenAI's graph knows
only the plain ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.core.progress import Progress, silent
from pipeline.errors import BackendUnavailable, InternalError, ModelError, UnsupportedError
from pipeline.llm.engine import (
    DETOKENIZER_FILE,
    MODEL_FILE,
    SETTINGS_FILE,
    TOKENIZER_FILE,
    ExportedModel,
    LanguageSettings,
)
from pipeline.llm.hf import check_tokenizer, load_model, load_tokenizer
from pipeline.llm.source import INSTALL, Description, Source, open_gguf

GGUF_FILE = "fp16.gguf"
ROTATED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
LARGEST = float(np.finfo(np.float16).max)


def export(
    source: Source, about: Description, out: Path, progress: Progress = silent
) -> ExportedModel:
    """Write the IR, the tokenizer and the settings of a model into `out`."""
    progress(None, "reading the weights")
    tokenizer = load_tokenizer(source)
    check_tokenizer(tokenizer, about.vocabulary, source)
    model = load_model(source)
    work = out / GGUF_FILE
    progress(None, "writing the weights in fp16")
    largest = write_gguf(model, about.architecture, work)
    progress(None, "making OpenVINO's graph")
    genai_graph(work)
    work.unlink()
    set_frequencies(out / MODEL_FILE, model)
    progress(None, "converting the tokenizer")
    write_tokenizer(tokenizer, out)
    settings = settings_of(source, about, model, tokenizer)
    (out / SETTINGS_FILE).write_text(settings.model_dump_json(indent=1), encoding="utf-8")
    return ExportedModel(root=out, file=MODEL_FILE, largest_weight=largest)


def write_gguf(model: Any, architecture: str, file: Path) -> float:
    """Write the weights of a module in fp16, and return the largest absolute value.

    ModelError if fp16 cannot hold it. The tokens in the file are only placeholders.
    """
    import gguf

    config = model.config
    by_name = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(by_name[architecture], config.num_hidden_layers)
    writer = gguf.GGUFWriter(str(file), architecture)
    _add_facts(writer, config)
    largest = 0.0
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        largest = max(largest, float(np.abs(values).max(initial=0.0)))
        if not largest <= LARGEST:
            raise ModelError(
                f"the weight `{name}` holds {largest:.3g}, and fp16 at most {LARGEST:.0f}",
                "check the weights: a trained model has none above 100 or so",
            )
        heads = ROTATED.get(name.split(".")[-2]) if architecture == "llama" else None
        if heads:
            values = _interleaved(values, getattr(config, heads))
        to = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if to is None:
            raise ModelError(f"the weight `{name}` has no place in GGUF", "choose another model")
        kind = np.float32 if values.ndim == 1 else np.float16
        writer.add_tensor(to, np.ascontiguousarray(values.astype(kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return largest


def _add_facts(writer: Any, config: Any) -> None:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(size)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(1)
    # GenAI refuses a file without a tokenizer, and one without special tokens
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    writer.add_token_types([3] * 3 + [1] * (config.vocab_size - 3))
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)


def _interleaved(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Return rows in GGUF's order of this architecture: the halves of a head interleaved."""
    rows = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)


def genai_graph(file: Path) -> None:
    """Let GenAI make its graph of a GGUF file, beside it. UnsupportedError if it cannot."""
    try:
        genai().LLMPipeline(str(file), "CPU", enable_save_ov_model=True)
    except RuntimeError as error:
        raise UnsupportedError(
            f"OpenVINO GenAI cannot read '{file.name}': {last_line(error)}",
            "use another format of GGUF, or another model",
        ) from error
    if not file.with_name(MODEL_FILE).is_file():
        raise InternalError(f"GenAI wrote no {MODEL_FILE}")


def genai() -> Any:
    """Import the library, or raise BackendUnavailable."""
    try:
        import openvino_genai
    except ImportError as error:
        raise BackendUnavailable(
            "the package `openvino-genai` is not installed", INSTALL
        ) from error
    return openvino_genai


def set_frequencies(file: Path, model: Any) -> None:
    """Replace the frequencies of the positions in the IR by those of the module.

    ModelError if the module also scales its angles.
    """
    import openvino as ov

    rotary = model.model.rotary_emb
    if float(getattr(rotary, "attention_scaling", 1.0)) != 1.0:
        raise ModelError(
            "this model scales its position embeddings (yarn or longrope), which GenAI cannot",
            "set `rope_parameters: {rope_type: default}` in config.json for short texts",
        )
    wanted = rotary.inv_freq.float().numpy()
    size = 2 * wanted.size
    base = model.config.rope_parameters["rope_theta"]
    plain = 1.0 / base ** (np.arange(0, size, 2) / size)
    if np.allclose(plain, wanted, rtol=1e-5):
        return
    graph = ov.Core().read_model(file)
    found = 0
    for node in graph.get_ops():
        if node.get_type_name() != "Constant" or node.get_output_size() != 1:
            continue
        values = np.asarray(node.get_data())
        if values.size == wanted.size and np.allclose(values.ravel(), plain, rtol=1e-3):
            new = ov.opset13.constant(wanted.reshape(values.shape).astype(values.dtype))
            node.output(0).replace(new.output(0))
            found += 1
    if not found:
        raise InternalError("GenAI's graph has no frequencies of positions")
    work = file.with_name("with_frequencies.xml")
    ov.save_model(graph, work, compress_to_fp16=False)
    del graph  # it maps the old file
    work.with_suffix(".bin").replace(file.with_suffix(".bin"))
    work.replace(file)


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer as OpenVINO's models."""
    import openvino as ov

    try:
        from openvino_tokenizers import convert_tokenizer
    except ImportError as error:
        raise BackendUnavailable(
            "the package `openvino-tokenizers` is not installed", INSTALL
        ) from error
    encoder, decoder = convert_tokenizer(tokenizer, with_detokenizer=True)
    ov.save_model(encoder, folder / TOKENIZER_FILE)
    ov.save_model(decoder, folder / DETOKENIZER_FILE)


def settings_of(source: Source, about: Description, model: Any, tokenizer: Any) -> LanguageSettings:
    """Collect what serving needs from the files of the model. Each file may name its own tokens
    that end an answer.
    """
    named = [model.generation_config.eos_token_id, model.config.eos_token_id]
    if source.kind == "gguf":  # chat models may end a turn by another token than a text
        fields = open_gguf(source.path).fields
        names = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        named += [fields[name].contents() for name in names if name in fields]
    ends = [tokenizer.eos_token_id]
    for each in named:
        ends += each if isinstance(each, list | tuple) else [each]
    ids = {int(each) for each in ends if each is not None}
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by name
        template = template.get("default")
    special = tokenizer.special_tokens_map.items()
    return LanguageSettings(
        end_tokens=tuple(sorted(each for each in ids if 0 <= each < about.vocabulary)),
        special_tokens={name: str(text) for name, text in special if not isinstance(text, list)},
        chat_template=template or "",
        context=about.context,
        vocabulary=about.vocabulary,
        cache_values_per_token=about.cache_values_per_token,
    )


def last_line(error: Exception) -> str:
    """Return what an error of OpenVINO says at its end."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
