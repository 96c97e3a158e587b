"""The model in PyTorch: transformers in fp32. It is the reference, and the source of all weights.

Weights of a GGUF file are dequantised by transformers, so that reference and candidates begin with
the same numbers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from pipeline.errors import BackendUnavailable, ModelError
from pipeline.host.environment import usable_cores
from pipeline.llm.source import INSTALL, Source


def _arguments(source: Source) -> tuple[str, dict[str, Any]]:
    if source.kind == "gguf":
        return str(source.path.parent), {"gguf_file": source.path.name}
    return str(source.path), {"trust_remote_code": False}


@contextlib.contextmanager
def _explained(source: Source, what: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise BackendUnavailable(f"reading {what} needs more packages: {error}", INSTALL) from error
    except (ValueError, OSError, KeyError, RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"transformers cannot read {what} of '{source.path}': {reason}",
            "check that all files belong to one model",
        ) from error


def load_model(source: Source) -> Any:
    """Return the module in fp32, ready to run."""
    with _explained(source, "the model"):
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        logging.getLogger("transformers").setLevel(logging.ERROR)
        place, arguments = _arguments(source)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, local_files_only=True, **arguments
        )
        return model.eval()


def use_cores(threads: int = 0) -> None:
    """Let torch compute on this number of threads, or on the cores that this process may use.

    torch itself knows no quota of a container: threads beyond it wait for each other. A lower
    OMP_NUM_THREADS counts.
    """
    import torch

    torch.set_num_threads(threads or min(torch.get_num_threads(), usable_cores()))


def load_tokenizer(source: Source) -> Any:
    """Return the tokenizer."""
    with _explained(source, "the tokenizer"):
        import transformers

        transformers.logging.set_verbosity_error()
        place, arguments = _arguments(source)
        return transformers.AutoTokenizer.from_pretrained(place, local_files_only=True, **arguments)


def check_tokenizer(tokenizer: Any, vocabulary: int, source: Source) -> None:
    """ModelError if the tokenizer gives ids that the model has no embedding for."""
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocabulary:
        raise ModelError(
            f"the tokenizer of '{source.path}' has ids up to {largest}, the model knows"
            f" {vocabulary}: they do not belong together",
            "copy the tokenizer of this model",
        )


def token_ids(tokenizer: Any, text: str, most: int) -> list[int]:
    """Return the first ids of a text, with what the tokenizer puts in front."""
    return [int(number) for number in tokenizer(text)["input_ids"][:most]]
