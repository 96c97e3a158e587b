"""The models that are served: one that does almost nothing, a CNN, and small ones for the soak."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    import torch

INPUT, OUTPUT = "x", "y"
OPSET = 17
TOKENS = 128
DATATYPES = {
    "float32": "FP32",
    "uint8": "UINT8",
    "int64": "INT64",
}  # of the Open Inference Protocol


def write_echo(path: Path, side: int) -> Path:
    """[batch, 3, side, side] -> the same, where no value is negative: one Relu."""
    shape = ("batch", 3, side, side)
    return _write(path, [helper.make_node("Relu", [INPUT], [OUTPUT])], shape, shape, [])


def write_first_pixel(path: Path, side: int) -> Path:
    """[batch, side, side, 3] uint8 -> the first pixel as [batch, 3]: what costs an engine least."""
    nodes = [
        helper.make_node("Gather", [INPUT, "zero"], ["row"], axis=1),
        helper.make_node("Gather", ["row", "zero"], ["pixel"], axis=1),
        helper.make_node("Cast", ["pixel"], [OUTPUT], to=TensorProto.FLOAT),
    ]
    zero = numpy_helper.from_array(np.array(0), "zero")
    given: list[str | int] = ["batch", side, side, 3]
    return _write(path, nodes, given, ["batch", 3], [zero], TensorProto.UINT8)


def write_cnn(path: Path, name: str, side: int, enlarged: int = 1) -> Path:
    """A CNN of torchvision with random weights, which may enlarge the image before all else:
    [batch, 3, side, side] -> [batch, 1000].
    """
    import torch
    import torchvision

    torch.manual_seed(0)
    model = getattr(torchvision.models, name)()
    for module in model.modules():
        if hasattr(
            module,
            "bn3",
            # deep ones: with random weights their activations grow from block to block, and errors
            # with them
        ):
            torch.nn.init.constant_(module.bn3.weight, 0.2)
    if enlarged > 1:
        model = torch.nn.Sequential(
            torch.nn.Upsample(scale_factor=enlarged), model
        )  # the nearest pixel
    return _export(path, model, torch.zeros(2, 3, side, side))


def write_text_encoder(path: Path, layers: int = 12) -> Path:
    """BERT-base with random weights and without a mask, whose rows are averaged:
    [batch, 128] int64 -> [batch, 768].
    """
    import torch
    from transformers import BertConfig, BertModel

    class Averaged(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = BertConfig(num_hidden_layers=layers, attn_implementation="sdpa")
            self.bert = BertModel(config, add_pooling_layer=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            # not through BertModel: while it is traced it makes a mask of ones
            hidden = self.bert.encoder(self.bert.embeddings(input_ids=ids)).last_hidden_state
            return cast(torch.Tensor, hidden.mean(1))

    torch.manual_seed(0)
    return _export(path, Averaged(), torch.zeros(2, TOKENS, dtype=torch.int64))


def _export(path: Path, module: torch.nn.Module, example: torch.Tensor) -> Path:
    """A module of one input, with a batch of 1 to 1024."""
    import torch

    program = torch.onnx.export(
        module.eval(),
        (example,),
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=1024)},),
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.save(str(path), external_data=False)
    return path


def write_small(path: Path, seed: int, side: int = 16) -> Path:
    """A CNN of 0.3 ms or so: [batch, 3, side, side] -> [batch, 10]. Every seed is another model."""
    random = np.random.default_rng(seed)

    def weights(name: str, *shape: int) -> onnx.TensorProto:
        values = random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        return numpy_helper.from_array(values.astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", [INPUT, "w1"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w2"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("GlobalAveragePool", ["d"], ["e"]),
        helper.make_node("Flatten", ["e"], ["f"]),
        helper.make_node("Gemm", ["f", "w3"], [OUTPUT], transB=1),
    ]
    return _write(
        path,
        nodes,
        ["batch", 3, side, side],
        ["batch", 10],
        [weights("w1", 32, 3, 3, 3), weights("w2", 32, 32, 3, 3), weights("w3", 10, 32)],
    )


def image(side: int, seed: int = 0) -> np.ndarray:
    """[1, 3, side, side] float32 from 0 to 1."""
    return np.random.default_rng(seed).random((1, 3, side, side), np.float32)


def oip_body(
    array: np.ndarray, name: str = INPUT, request_id: str = ""
) -> tuple[bytes, dict[str, str]]:
    """A request of the Open Inference Protocol with binary tensors, both ways: body and headers.

    The array is float32, uint8 or int64.
    """
    tensor = {
        "name": name,
        "shape": array.shape,
        "datatype": DATATYPES[array.dtype.name],
        "parameters": {"binary_data_size": array.nbytes},
    }
    document = {
        **({"id": request_id} if request_id else {}),
        "inputs": [tensor],
        "parameters": {"binary_data_output": True},
    }
    head = json.dumps(document).encode()
    return head + array.tobytes(), {"Inference-Header-Content-Length": str(len(head))}


def _write(
    path: Path,
    nodes: list[onnx.NodeProto],
    given: Sequence[str | int],
    taken: Sequence[str | int],
    weights: list[onnx.TensorProto],
    dtype: int = TensorProto.FLOAT,
) -> Path:
    """`dtype` is that of the input; the output is float32."""
    inputs, outputs = (
        [helper.make_tensor_value_info(name, kind, shape)]
        for name, kind, shape in ((INPUT, dtype, given), (OUTPUT, TensorProto.FLOAT, taken))
    )
    graph = helper.make_graph(nodes, "model", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path
