"""Reading what cannot be trusted, describing it, writing it back."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from pipeline.cli.inspect import read_model
from pipeline.cli.lint import read_named
from pipeline.core.artifacts import ModelSource
from pipeline.errors import ModelError
from pipeline.onnx_graph.files import (
    copy_model,
    external_files,
    file_digest,
    file_size,
    onnx_model,
    operator_histogram,
    read_proto,
    write_proto,
)
from pipeline.plan.schema import ExportConfig
from pipeline.stages.export import export
from tests.pipeline.onnx_graph.builders import parse, save


def external_model(folder: Path, location: str, **entries: str) -> Path:
    """y = x + w, with w (4 floats) in external data at `location`."""
    proto = parse(
        "g (float[N, 4] x) => (float[N, 4] y) <float[4] w = {1, 2, 3, 4}> { y = Add(x, w) }"
    )
    tensor = proto.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=value)
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


WEIGHTS = np.array([1, 2, 3, 4], np.float32)


@pytest.mark.parametrize("content", [b"", b"this is not a model", b"\x08"])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.onnx"):
        read_proto(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model at"):
        read_proto(tmp_path / "absent.onnx")


@pytest.mark.parametrize("part", [0.3, 0.6, 0.9, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, part: float) -> None:
    path = save(
        tmp_path,
        "g (float[N, 4] x) => (float[N, 4] y) <float[4] w = {1, 2, 3, 4}> { h = Relu(x)  k ="
        " Sigmoid(h)  y = Add(k, w) }",
    )
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    with pytest.raises(ModelError, match=r"not a complete ONNX file|no ONNX graph"):
        read_proto(path)


def test_a_dangling_tensor_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, "g (float[4] x) => (float[4] y) { y = Add(x, ghost) }")
    with pytest.raises(ModelError, match=r"\(Add\).*'ghost'"):
        read_proto(path)


def test_an_output_that_nothing_makes_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, "g (float[4] x) => (float[4] y) { z = Relu(x) }")
    with pytest.raises(ModelError, match="output 'y'"):
        read_proto(path)


def test_an_unknown_element_type_is_refused(tmp_path: Path) -> None:
    proto = parse("g (float[4] x) => (float[4] y) <float[1] w = {1}> { y = Add(x, w) }")
    proto.graph.initializer[0].data_type = 99
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="element type 99"):
        read_proto(tmp_path / "model.onnx")


def test_external_data_is_read_from_the_models_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "w.bin").write_bytes(b"\0" * 8 + WEIGHTS.tobytes())
    path = external_model(tmp_path, "data/w.bin", offset="8", length="16")
    tensor = read_proto(path).graph.initializer[0]
    assert np.array_equal(onnx.numpy_helper.to_array(tensor), WEIGHTS)
    assert external_files(path) == ((tmp_path / "data" / "w.bin").resolve(),)
    assert file_size(path) == path.stat().st_size + 24


@pytest.mark.parametrize(
    "location",
    ["../w.bin", "sub/../../w.bin", "{outside}", "", "..\\w.bin", "C:\\w.bin", "w\0.bin"],
)
def test_external_data_outside_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "w.bin").write_bytes(WEIGHTS.tobytes())
    folder = tmp_path / "model"
    folder.mkdir()
    location = location.format(outside=tmp_path / "w.bin")
    path = external_model(folder, location)
    for weights in (True, False):
        with pytest.raises(ModelError, match="tensor 'w'") as error:
            read_proto(path, weights)
        assert f"'{location}'" in error.value.message


def in_a_sparse_constant(proto: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    sparse = onnx.SparseTensorProto(
        values=tensor, indices=onnx.numpy_helper.from_array(np.arange(4), "i"), dims=[4]
    )
    proto.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w"], sparse_value=sparse))


def in_a_subgraph_of_a_function(proto: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    branch = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["w"], ["o"])], "b", [], [], [tensor]
    )
    node = onnx.helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    proto.functions.append(
        onnx.helper.make_function("d", "F", ["c"], ["y"], [node], proto.opset_import)
    )


def in_a_sparse_initializer(proto: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    values = onnx.numpy_helper.from_array(WEIGHTS, "w")
    proto.graph.sparse_initializer.add(values=values, indices=tensor, dims=[4])


def in_a_list_of_an_attribute(proto: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    node = onnx.helper.make_node("F", ["x"], ["w"], domain="d", values=[tensor])
    proto.graph.node.insert(0, node)


def in_a_training_graph(proto: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    proto.training_info.add().algorithm.initializer.append(tensor)


@pytest.mark.parametrize(
    "hide",
    [
        in_a_sparse_constant,
        in_a_sparse_initializer,
        in_a_list_of_an_attribute,
        in_a_subgraph_of_a_function,
        in_a_training_graph,
    ],
)
def test_external_data_outside_the_folder_is_found_wherever_it_hides(
    tmp_path: Path, hide: Callable[[onnx.ModelProto, onnx.TensorProto], None]
) -> None:
    path = external_model(tmp_path, "../w.bin")
    proto = onnx.ModelProto.FromString(path.read_bytes())
    hide(proto, proto.graph.initializer.pop())
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="tensor 'w'"):
        read_proto(path)


@pytest.mark.parametrize(
    "read",
    [
        external_files,
        file_digest,
        file_size,
        operator_histogram,
        lambda path: onnx_model(path.parent, path.name),
        lambda path: copy_model(path, path.with_name("copy.onnx")),
        read_named,
        read_model,
        lambda path: export(ModelSource(path=path), (), ExportConfig(), (), path.parent),
    ],
    ids=[
        "external_files",
        "file_digest",
        "file_size",
        "operator_histogram",
        "onnx_model",
        "copy_model",
        "crucible lint",
        "crucible inspect",
        "export",
    ],
)
def test_no_reader_of_a_users_model_follows_external_data_out_of_its_folder(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    (tmp_path / "w.bin").write_bytes(WEIGHTS.tobytes())
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"tensor 'w' .* external data at '\.\./w\.bin'"):
        read(external_model(folder, "../w.bin"))


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(WEIGHTS.tobytes())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "w.bin").symlink_to(tmp_path / "w.bin")
    with pytest.raises(ModelError, match=r"tensor 'w'.*'w\.bin', a link"):
        read_proto(external_model(folder, "w.bin"))


def test_a_missing_external_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tensor 'w'.*'w\.bin', which is missing"):
        read_proto(external_model(tmp_path, "w.bin"), weights=False)


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"offset": "8"}, "expected 16 bytes for its shape, got 8"),
        ({"offset": "0", "length": "64"}, "expected bytes 0 to 64, the file has 16"),
        ({"offset": "-4"}, "expected bytes -4"),
        ({"offset": str(2**62)}, f"expected bytes {2**62} to"),
        ({"offset": str(-(2**62)), "length": str(2**62 + 16)}, "expected bytes -"),
        ({"length": str(2**62)}, f"expected bytes 0 to {2**62}, the file has 16"),
        ({"length": "9" * 5000}, "not a number"),
        ({"length": "many"}, "not a number"),
    ],
)
def test_external_data_of_the_wrong_size_is_refused(
    tmp_path: Path, entries: dict[str, str], match: str
) -> None:
    (tmp_path / "w.bin").write_bytes(WEIGHTS.tobytes())
    with pytest.raises(ModelError, match=match):
        read_proto(external_model(tmp_path, "w.bin", **entries))


def test_a_model_over_2_gib_is_described(tmp_path: Path) -> None:
    rows = 2**31 // 4096 + 1
    proto = parse(f"g (float[N, {rows}] x) => (float[N, 1024] y) {{ y = MatMul(x, w) }}")
    tensor = proto.graph.initializer.add(
        name="w", dims=[rows, 1024], data_type=onnx.TensorProto.FLOAT
    )
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="big.data")
    with (tmp_path / "big.data").open("wb") as stream:
        stream.truncate(rows * 4096)  # a hole: no disk used
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    model = onnx_model(tmp_path, "model.onnx")
    assert model.outputs[0].shape == ("N", 1024)
    assert file_size(path) > 2**31
    assert operator_histogram(path) == {"MatMul": 1}


def test_without_weights_large_values_are_left_out_and_small_ones_stay(tmp_path: Path) -> None:
    proto = parse(
        "g (float[N, 2] x) => (float[N, 20000] y) <int64[2] shape = {-1, 20000}> { h = MatMul(x, w)"
        "  y = Reshape(h, shape) }"
    )
    proto.graph.initializer.append(
        onnx.numpy_helper.from_array(np.ones((2, 20000), np.float32), "w")
    )
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    tensors = {tensor.name: tensor for tensor in read_proto(path, weights=False).graph.initializer}
    assert not tensors["w"].raw_data
    assert list(tensors["w"].dims) == [2, 20000]
    assert list(onnx.numpy_helper.to_array(tensors["shape"])) == [-1, 20000]


def test_large_weights_are_written_outside_and_read_back(tmp_path: Path) -> None:
    weights = np.arange(40000, dtype=np.float32).reshape(2, 20000)
    proto = parse("g (float[N, 2] x) => (float[N, 20000] y) { y = MatMul(x, w) }")
    proto.graph.initializer.add(
        name="w", dims=weights.shape, data_type=onnx.TensorProto.FLOAT, float_data=weights.ravel()
    )
    path = tmp_path / "model.onnx"
    (tmp_path / "model.onnx.data").write_bytes(b"left over")
    write_proto(proto, path, external_above_bytes=1000)
    assert external_files(path) == ((tmp_path / "model.onnx.data").resolve(),)
    assert file_size(path) - path.stat().st_size == weights.nbytes
    assert np.array_equal(
        onnx.numpy_helper.to_array(read_proto(path).graph.initializer[0]), weights
    )


def test_small_models_are_written_whole(tmp_path: Path) -> None:
    proto = parse("g (float[4] x) => (float[4] y) { y = Relu(x) }")
    write_proto(proto, tmp_path / "model.onnx")
    assert read_proto(tmp_path / "model.onnx") == proto
    assert not external_files(tmp_path / "model.onnx")


def test_the_digest_covers_graph_and_weights_but_not_the_place(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(WEIGHTS.tobytes())
    path = external_model(tmp_path, "w.bin")
    first = file_digest(path)
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in ("model.onnx", "w.bin"):
        shutil.copy(tmp_path / file, moved / file)
    assert file_digest(moved / "model.onnx") == first
    (moved / "w.bin").write_bytes((WEIGHTS + 1).tobytes())
    assert file_digest(moved / "model.onnx") != first


def test_a_model_without_the_default_operator_set_is_refused(tmp_path: Path) -> None:
    proto = parse("g (float[3] x) => (float[3] y) { y = Relu(x) }")
    proto.opset_import[0].domain = "somewhere.else"
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="operator set"):
        onnx_model(tmp_path, "model.onnx")


def test_operators_are_counted_in_subgraphs_too(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        """g (float[N] x, bool c) => (float[N] y) {
            h = Relu(x)
            y = If (c) <then_branch = t () => (float[N] a) { a = Relu(h) },
              else_branch = e () => (float[N] b) { b = com.example.Twist(h) }>
        }""",
    )
    assert operator_histogram(path) == {"Relu": 2, "If": 1, "com.example::Twist": 1}
