"""Engines of the doubles, ready to be loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from pipeline.backends.tensorrt.messages import logger_of
from pipeline.backends.tensorrt.session import TrtLoaded, load_engine
from pipeline.core import Engine, Precision, Profile, Recipe, Target, Tensors, TensorSpec
from tests.pipeline.backends.cuda_double import CudaDouble
from tests.pipeline.backends.tensorrt.trt_double import Arrays, Program, TensorRTDouble

X = TensorSpec(name="x", dtype="float32", shape=("n", 2), kind="dynamic")
FLAG = TensorSpec(name="flag", dtype="bool", shape=())
Y = TensorSpec(name="y", dtype="float32", shape=("n", 2), kind="dynamic")


def doubled(arrays: Arrays) -> Arrays:
    return {"y": arrays["x"] * 2 + arrays["flag"]}


DOUBLE = Program(
    inputs={"x": ("FLOAT", (-1, 2)), "flag": ("BOOL", ())},
    outputs={"y": "FLOAT"},
    run=doubled,
    shapes=lambda shapes, host: {"y": shapes["x"]},
)


def feeds(rows: int, start: float = 0) -> Tensors:
    return {
        "x": np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) + np.float32(start),
        "flag": np.array(True),
    }


def found(arrays: Arrays) -> Arrays:
    return {"where": np.stack(np.nonzero(arrays["x"]))}


POSITIONS = Program(
    inputs={"x": ("FLOAT", (-1, 2))},
    outputs={"where": "INT64"},
    run=found,
    shapes=lambda shapes, host: {"where": (2, -1)},
)
WHERE = TensorSpec(name="where", dtype="int64", shape=(2, "found"), kind="data-dependent")


class Bench:
    """Doubles and a folder, ready to load engines of programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cuda = CudaDouble()

    def engine(
        self,
        program: Program = DOUBLE,
        inputs: tuple[TensorSpec, ...] = (X, FLAG),
        outputs: tuple[TensorSpec, ...] = (Y,),
        profiles: tuple[Profile, ...] = (Profile(dims={"n": [0, 2, 16]}),),
        recipe: Recipe | None = None,
    ) -> Engine:
        self.trt = TensorRTDouble(self.cuda, {"the engine": program})
        (self.folder / "engine.plan").write_text("the engine")
        return Engine(
            root=self.folder,
            file="engine.plan",
            digest=hashlib.sha256(b"the engine").hexdigest(),
            target=Target(
                backend="tensorrt", version="10.6.0", device="double", compute_capability="9.0"
            ),
            recipe=recipe or Recipe(backend="tensorrt", precision=Precision.FP32),
            inputs=inputs,
            outputs=outputs,
            profiles=profiles,
            threads=0,
            size_bytes=10,
        )

    def load(self, engine: Engine, device: str = "") -> TrtLoaded:
        return load_engine(self.trt, engine, logger_of(self.trt), device, rt=self.cuda)
