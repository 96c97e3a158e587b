"""The source: what is missing is named, and every edit that matters changes the digest."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from pipeline.core.shapes import Profile, TensorSpec
from pipeline.errors import ModelError, PlanError
from pipeline.plan.schema import ModelConfig
from pipeline.plan.source import _imported_versions, check_profiles, code_digest, source_from_config

IMAGE = TensorSpec(name="image", dtype="float32", shape=("batch", 1, 8, 8))
IDS = TensorSpec(name="ids", dtype="int64", shape=("batch", "sequence"))
PROFILE = Profile.model_validate({"dims": {"batch": [1, 8, 64]}})


def config(folder: Path, **changes: object) -> ModelConfig:
    fields = {
        "entrypoint": "net:make",
        "python_path": folder,
        "weights_from": "nowhere, a test",
        "inputs": (IMAGE,),
    }
    return ModelConfig.model_validate({**fields, **changes})


def write_net(folder: Path, text: str = "def make():\n    return 1\n") -> None:
    (folder / "net.py").write_text(text)


def digest(folder: Path, **changes: object) -> str:
    return source_from_config(config(folder, **changes), (PROFILE,)).digest


def test_editing_one_line_of_the_model_function_changes_the_digest(tmp_path: Path) -> None:
    write_net(tmp_path)
    before = digest(tmp_path)
    assert digest(tmp_path) == before
    write_net(tmp_path, "def make():\n    return 2\n")
    assert digest(tmp_path) != before


def test_the_digest_does_not_depend_on_where_the_files_lie(tmp_path: Path) -> None:
    digests = set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        write_net(tmp_path / name)
        (tmp_path / name / "w.safetensors").write_bytes(b"weights")
        digests.add(digest(tmp_path / name, weights=tmp_path / name / "w.safetensors"))
    assert len(digests) == 1


def test_weights_seed_and_inputs_are_part_of_the_digest(tmp_path: Path) -> None:
    write_net(tmp_path)
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(b"one")
    before = digest(tmp_path, weights=weights)
    weights.write_bytes(b"two")
    half = IMAGE.model_copy(update={"dtype": "float16"})
    digests = [
        digest(tmp_path, weights=weights),
        digest(tmp_path, weights=weights, seed=1),
        digest(tmp_path, weights=weights, inputs=(half,)),
    ]
    assert len({before, *digests}) == 4


def test_code_of_a_module_includes_what_it_imports_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "block.py").write_text("def f():\n    import deep\n")
    (tmp_path / "deep.py").write_text("x = 1\n")
    write_net(tmp_path, "import json, layers.block\ndef make(): pass\n")
    before = code_digest("net:make", tmp_path)
    (tmp_path / "use.py").write_text("import net\n")
    assert code_digest("net:make", tmp_path) == before
    (tmp_path / "deep.py").write_text("x = 2\n")
    changed = code_digest("net:make", tmp_path)
    (tmp_path / "layers" / "more.py").write_text("x = 1\n")
    assert len({before, changed, code_digest("net:make", tmp_path)}) == 3


def test_code_of_a_module_that_imports_at_run_time_is_what_it_may_import(tmp_path: Path) -> None:
    write_net(tmp_path, "import importlib\ndef make(): importlib.import_module('lay' + 'ers')\n")
    before = code_digest("net:make", tmp_path)
    for ignored in (
        ".hidden/x.py",
        "venv/lib/x.py",
        "__pycache__/x.py",
        "not-a-package/x.py",
        "data.txt",
    ):
        (tmp_path / ignored).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ignored).write_text("x = 1\n")
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    assert code_digest("net:make", tmp_path) == before
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "block.py").write_text("x = 1\n")
    assert code_digest("net:make", tmp_path) != before


def test_code_of_a_package_is_the_whole_package_and_not_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    (tmp_path / "models" / "net.py").write_text("x = 1\n")
    before = code_digest("models.net:make", tmp_path)
    (tmp_path / "other.py").write_text("x = 1\n")
    assert code_digest("models.net:make", tmp_path) == before
    (tmp_path / "models" / "__init__.py").write_text("x = 1\n")
    assert code_digest("models.net:make", tmp_path) != before


def test_an_installed_package_counts_by_its_version(tmp_path: Path) -> None:
    assert code_digest("onnx:load", tmp_path) == code_digest("onnx:load", tmp_path / "elsewhere")
    assert code_digest("yaml:load", tmp_path) != code_digest(
        "onnx:load", tmp_path
    )  # yaml's distribution is called PyYAML


def test_the_versions_of_what_the_code_imports_count(tmp_path: Path) -> None:
    write_net(tmp_path)
    text = (
        b"import json\nimport numpy\ndef make():\n    from yaml import load\n    import"
        b" net.layers\n"
    )
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "PyYAML")}
    assert _imported_versions([text], "net", (tmp_path,)) == versions


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"entrypoint": "nett:make"}, "no module 'nett'"),
        ({"weights": Path("gone.safetensors")}, "model.weights: no file at 'gone.safetensors'"),
        ({"entrypoint": None, "path": Path("gone.onnx")}, "model.path: no file at 'gone.onnx'"),
        (
            {"inputs": (IMAGE.model_copy(update={"dtype": "float"}),)},
            "input 'image' has dtype 'float'",
        ),
        (
            {"inputs": (IMAGE.model_copy(update={"dtype": "flaot32"}),)},
            "input 'image' has dtype 'flaot32'",
        ),
        ({"inputs": (IMAGE, IMAGE)}, "the name 'image' appears twice"),
        ({"outputs": ("a", "a")}, "the name 'a' appears twice"),
    ],
)
def test_an_impossible_source_is_named(
    tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    write_net(tmp_path)
    with pytest.raises(PlanError, match=expected) as error:
        source_from_config(config(tmp_path, **changes), (PROFILE,))
    assert error.value.next_step


def test_a_corrupt_onnx_file_and_external_data_outside_the_folder_are_refused(
    tmp_path: Path,
) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"not a model")
    onnx_config = ModelConfig(path=file)
    with pytest.raises(ModelError, match=r"model\.onnx"):
        source_from_config(onnx_config, ())
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [1], [1.0])
    output = onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [1])
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.ClearField("float_data")
    weight.external_data.add(key="location", value="../secret.bin")
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [output], [weight])), file)
    with pytest.raises(ModelError, match=r"\.\./secret\.bin"):
        source_from_config(onnx_config, ())


def test_a_symbol_without_a_range_is_an_error_that_says_what_to_write() -> None:
    with pytest.raises(
        PlanError, match=r"dimension 'sequence' of input 'ids' \[batch, sequence\] has no range"
    ) as error:
        check_profiles((IDS,), (PROFILE,))
    assert "{batch: [1, 8, 64], sequence: [1, 8, 64]}" in error.value.next_step
    assert "--profile sequence=1:8:64" in error.value.next_step


def test_no_profile_is_an_error_with_symbols_and_an_empty_profile_without() -> None:
    with pytest.raises(PlanError, match="no profiles"):
        check_profiles((IMAGE,), ())
    assert check_profiles((TensorSpec(name="x", dtype="float32", shape=(1, 2)),), ()) == (
        Profile(),
    )


def test_an_unknown_symbol_in_a_profile_names_the_near_one() -> None:
    with pytest.raises(PlanError, match="'bacth'") as error:
        check_profiles((IMAGE,), (Profile.model_validate({"dims": {"bacth": [1, 2, 3]}}),))
    assert error.value.next_step == "did you mean 'batch'?"


K = TensorSpec(name="k", dtype="int64", shape=(1,))


def valued(name: str, values: object) -> tuple[Profile, ...]:
    return (Profile.model_validate({"dims": {"batch": [1, 8, 64]}, "values": {name: values}}),)


@pytest.mark.parametrize(
    "spec", [K, K.model_copy(update={"shape": ()}), K.model_copy(update={"dtype": "int32"})]
)
def test_ranges_of_values_fit_scalars_and_vectors_of_integers(spec: TensorSpec) -> None:
    assert check_profiles((IMAGE, spec), valued("k", [1, 5, 10])) == valued("k", [1, 5, 10])


@pytest.mark.parametrize(
    ("spec", "profiles", "message", "advice"),
    [
        (K, valued("kk", [1, 5, 10]), "the model has no input 'kk'", "did you mean 'k'?"),
        (K, valued("zzz", [1, 5, 10]), "the model has no input 'zzz'", "its inputs are image, k"),
        (
            K,
            valued("image", [1, 5, 10]),
            r"input 'image' is float32\[batch, 1, 8, 8\], and only int32 and int64",
            "leave `values` of 'image' out",
        ),
        (
            K,
            valued("k", [[1, 1], [2, 2], [3, 3]]),
            r"input 'k' is int64\[1\], which has 1 values, and the range gives 2",
            "each of them a list of 1",
        ),
        (
            K.model_copy(update={"shape": ("batch",)}),
            valued("k", [1, 2, 3]),
            r"int64\[batch\], expected a fixed shape of rank 0 or 1",
            "fix the number",
        ),
        (
            K.model_copy(update={"shape": (1, 1)}),
            valued("k", [1, 2, 3]),
            "expected a fixed shape of rank 0 or 1",
            "fix the number",
        ),
    ],
)
def test_ranges_of_values_that_fit_no_input_are_refused(
    spec: TensorSpec, profiles: tuple[Profile, ...], message: str, advice: str
) -> None:
    with pytest.raises(PlanError, match=message) as error:
        check_profiles((IMAGE, spec), profiles)
    assert advice in error.value.next_step


def test_inputs_may_share_symbols() -> None:
    both = Profile.model_validate({"dims": {"batch": [1, 2, 3], "sequence": [1, 2, 3]}})
    assert check_profiles((IDS, IDS.model_copy(update={"name": "mask"})), (both,)) == (both,)


def test_neither_torch_nor_onnx_is_loaded_for_an_entrypoint() -> None:
    script = (
        "import sys, pipeline.plan.source; assert not {'torch', 'onnx', 'onnxruntime'} &"
        " set(sys.modules), sorted(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
