"""The source of a language model: a GGUF file, or a folder in the form of Hugging Face.

Nothing in it runs: a model with code of its own is refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeline.core.frozen import Frozen
from pipeline.core.progress import Progress, silent
from pipeline.distribution import install_command
from pipeline.errors import BackendUnavailable, ModelError, PlanError
from pipeline.llm.plan import PACKAGE

INSTALL = install_command("llm")

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Hugging Face's `model_type`, and GGUF's name of the same architecture."""

BITS = {"F32": 32, "F16": 16, "BF16": 16, "Q8_0": 8, "Q6_K": 6, "Q5_K": 5, "Q4_K": 4}
"""Bits of a weight in the formats of GGUF; others have the digit in their name."""


OTHER_SUFFIXES = (".json", ".model", ".txt", ".jinja")
"""Of the files beside the weights: tokenizer, templates and settings."""

READ_ERRORS = (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)
"""What damaged or hostile descriptions of a model cause."""

VOCABULARIES = ("tokenizer.json", "vocab.json")  # or a .model of SentencePiece

Kind = Literal["gguf", "huggingface"]


class Source(Frozen):
    """Where the model lies, and its content."""

    kind: Kind
    path: Path
    digest: str


class Description(Frozen):
    """What the files say of the model."""

    architecture: str = Field(description="GGUF's name.")
    parameters: int = Field(description="Number of parameters.")
    layers: int = Field(description="Number of layers.")
    hidden: int = Field(description="Size of the hidden states.")
    cache_values_per_token: int = Field(description="Of keys and values, in all layers.")
    vocabulary: int = Field(description="Number of tokens.")
    context: int = Field(description="The longest text for which it was trained.")
    window: int | None = Field(description="Tokens that attention looks back. null: all.")
    stored_as: str = Field(description="The format of most weights.")
    stored_bits: int = Field(description="Its bits.")

    @property
    def is_quantised(self) -> bool:
        return self.stored_bits < 16


def find_source(path: str) -> Source:
    """Find the files and hash them. PlanError if there are none, ModelError if some are missing.

    The digest of a GGUF file is that of its content; in a folder, names of files count, too.
    """
    place = model_place(path)
    kind, files = model_files(place)
    if kind == "gguf":
        return Source(kind=kind, path=place, digest=_digest(place))
    lines = "".join(f"{file.name} {_digest(file)}\n" for file in files)
    return Source(kind=kind, path=place, digest=hashlib.sha256(lines.encode()).hexdigest())


def model_place(path: str) -> Path:
    """Return where the model of a plan lies. PlanError if it is in a package that is missing."""
    return Path(path) if not path.startswith(PACKAGE) else _in_package(path)


def model_files(place: Path) -> tuple[Kind, list[Path]]:
    """Return the files of a model and their kind, unread. Errors as `find_source`."""
    if place.is_dir():
        return "huggingface", _checked_folder(place)
    if not place.is_file():
        raise PlanError(
            f"language_model.path: nothing at '{place}'",
            "give a GGUF file or a folder with config.json; paths start at the plan's folder",
        )
    with place.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(
                f"'{place}' is not a GGUF file: it does not begin with GGUF",
                "give a GGUF file, or the folder of a model with config.json",
            )
    return "gguf", [place]


def _in_package(path: str) -> Path:
    name, _, file = path.removeprefix(PACKAGE).partition("/")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        raise PlanError(
            f"language_model.path: no package `{name}` is installed",
            f"install it (`pip install {name.replace('_', '-')}`), or give the path of a file",
        )
    return Path(spec.origin).parent / file


def _checked_folder(folder: Path) -> list[Path]:
    """Return the files of a model. ModelError if one is missing, or if it has code."""
    config = read_config(folder)
    if "auto_map" in config:
        raise ModelError(
            f"'{folder}' has code of its own (`auto_map` in config.json), which is never run",
            "use a model of an architecture that transformers has",
        )
    index = folder / "model.safetensors.index.json"
    shards = _shards(index) if index.is_file() else ["model.safetensors"]
    files = [folder / name for name in ("config.json", *shards)]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not shards:
        raise ModelError(
            f"'{folder}' lacks {', '.join(missing) or 'weights'}",
            "copy all files of the model: config.json, *.safetensors and the tokenizer",
        )
    others = [file for file in sorted(folder.iterdir()) if file.suffix in OTHER_SUFFIXES]
    if not any(file.name in VOCABULARIES or file.suffix == ".model" for file in others):
        raise ModelError(
            f"'{folder}' has no tokenizer: expected tokenizer.json",
            "copy the files of the tokenizer beside the weights",
        )
    return [*files, *(file for file in others if file not in files)]


def _shards(index: Path) -> list[str]:
    """Return the names of the files of weights. ModelError if one is no plain file name."""
    named = _json(index).get("weight_map")
    names = sorted(set(map(str, named.values()))) if isinstance(named, dict) else []
    if foreign := [name for name in names if Path(name).name != name]:
        raise ModelError(
            f"'{index}' names '{foreign[0]}', expected a file in the same folder",
            "copy all files of the model into one folder",
        )
    return names


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return config.json. ModelError if there is none."""
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"'{folder}' has no config.json", "give the folder of a model as Hugging Face writes it"
        )
    return _json(folder / "config.json")


def _json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"'{file}' is not JSON: {error}", "copy the file again") from error
    if not isinstance(document, dict):
        raise ModelError(f"'{file}' is not a JSON object", "copy the file again")
    return document


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def describe(source: Source, context: int, progress: Progress = silent) -> Description:
    """Read what the files say. ModelError if Crucible cannot compile this model, PlanError if it
    was not made for texts of `context` tokens.
    """
    progress(None, "reading the model")
    try:
        found = _of_gguf(source.path) if source.kind == "gguf" else _of_folder(source.path)
    except READ_ERRORS as error:
        raise ModelError(
            f"what '{source.path}' says of the model does not fit: {type(error).__name__}: {error}",
            "copy its files again",
        ) from error
    for longest, what in ((found.context, "was trained for"), (found.window, "looks back")):
        if longest is not None and context > longest:
            raise PlanError(
                f"context: expected at most {longest}, because the model {what} {longest} tokens;"
                f" got {context}",
                f"set `context: {longest}`, or less",
            )
    return found


def _of_folder(folder: Path) -> Description:
    config = read_config(folder)
    kind = str(config.get("model_type"))
    if kind not in ARCHITECTURES:
        raise _unknown(kind)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    layers = config["num_hidden_layers"]
    size = config.get("head_dim") or hidden // heads
    cached = 2 * layers * size * (config.get("num_key_value_heads") or heads)
    context, vocabulary = config["max_position_embeddings"], config["vocab_size"]
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    bits = 32 if dtype == "float32" else 16
    return Description(
        architecture=ARCHITECTURES[kind],
        parameters=sum(_tensor_sizes(folder)),
        layers=layers,
        hidden=hidden,
        cache_values_per_token=cached,
        vocabulary=vocabulary,
        context=context,
        window=window,
        stored_as=dtype,
        stored_bits=bits,
    )


def _tensor_sizes(folder: Path) -> list[int]:
    """Return the number of values of each tensor, from the headers of the files alone."""
    sizes = []
    for file in _checked_folder(folder):
        if file.suffix != ".safetensors":
            continue
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(file.stat().st_size, 1 << 27):
                raise ModelError(
                    f"'{file}' is no file of safetensors, or only a part", "copy it again"
                )
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        if file.stat().st_size != 8 + length + end:
            raise ModelError(
                f"'{file}' has {file.stat().st_size} bytes, its header says {8 + length + end}",
                "copy it again",
            )
        sizes += [math.prod(tensor["shape"]) for tensor in header.values()]
    return sizes


def _of_gguf(file: Path) -> Description:
    reader = open_gguf(file)

    def field(name: str, otherwise: Any = None) -> Any:
        found = reader.fields.get(name)
        if found is None and otherwise is None:
            raise ModelError(f"'{file}' lacks `{name}`", "convert the model to GGUF again")
        return otherwise if found is None else found.contents()

    name = field("general.architecture")
    if name not in ARCHITECTURES.values():
        raise _unknown(name)
    layers, hidden = field(f"{name}.block_count"), field(f"{name}.embedding_length")
    heads = field(f"{name}.attention.head_count")
    size = field(f"{name}.attention.key_length", hidden // heads)
    sizes = Counter[str]()
    in_blocks = Counter[str]()
    vocabulary = 0
    for tensor in reader.tensors:
        count = int(tensor.n_elements)
        sizes[tensor.tensor_type.name] += count
        in_blocks[tensor.tensor_type.name] += count * tensor.name.startswith("blk.")
        if tensor.name == "token_embd.weight":
            vocabulary = count // hidden
    ((stored, _),) = in_blocks.most_common(1)
    return Description(
        architecture=name,
        parameters=sum(sizes.values()),
        layers=layers,
        hidden=hidden,
        cache_values_per_token=2 * layers * size * field(f"{name}.attention.head_count_kv", heads),
        vocabulary=vocabulary,
        context=field(f"{name}.context_length"),
        window=field(f"{name}.attention.sliding_window", 0) or None,
        stored_as=stored,
        stored_bits=BITS.get(stored) or next((int(c) for c in stored if c.isdigit()), 16),
    )


def open_gguf(file: Path) -> Any:
    """Open a GGUF file. ModelError if it is damaged."""
    try:
        import gguf
    except ImportError as error:
        raise BackendUnavailable("the package `gguf` is not installed", INSTALL) from error
    try:
        return gguf.GGUFReader(str(file))
    except Exception as error:
        raise ModelError(f"'{file}' is damaged: {error}", "copy it again") from error


def _unknown(name: str) -> ModelError:
    known = ", ".join(sorted({*ARCHITECTURES, *ARCHITECTURES.values()}))
    return ModelError(
        f"the architecture `{name}` is not known; known: {known}",
        "choose a model of one of these",
    )
