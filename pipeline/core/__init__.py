"""The core types: every value that crosses from one part of the pipeline to another.

They import no other part of the pipeline.

    ModelSource -> OnnxModel -> OnnxModel (simplified) -> OnnxModel (converted, by a Recipe) ->
    Engine

Values written to disk are frozen pydantic models; values that stay in memory are frozen
dataclasses.
"""
