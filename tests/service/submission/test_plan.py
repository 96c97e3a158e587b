"""A submitted plan reaches nothing beyond the upload, and becomes an ordinary plan."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.backends.pytorch.module import load_module
from pipeline.plan.source import source_from_config
from service.errors import Unprocessable
from service.settings import Settings
from service.submission.plan import SubmittedPlan, identity, parse, plan_from
from service.submission.uploads import Part

KEYS = (
    "name architecture classes inputs outputs profiles data accuracy candidates rescue export"
    " simplify calibration tensorrt benchmark serving"
)


def upload(folder: Path, name: str, filename: str, content: bytes = b"x") -> Part:
    (folder / name).write_bytes(content)
    return Part(name, folder / name, "0" * 64, len(content), filename)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


def test_the_list_of_keys_is_this() -> None:
    """A new one edits this list and docs/service.md; think of what a stranger could do with it."""
    assert list(SubmittedPlan.model_fields) == KEYS.split()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"model: {path: /etc/passwd}", "unknown key 'model'"),
        (b"data: {calibration: /etc/passwd}", "data.calibration"),
        (b"data: {calibration: ../x.npz}", "data.calibration"),
        (b"data: {validation: file:///etc/passwd}", "unknown key 'data.validation'"),
        (b"accuracy: {metric: 'os:system'}", "no metric 'os:system'"),
        (b"accuracy: {python_path: /tmp}", "unknown key 'accuracy.python_path'"),
        (b"simplify: {surgery: 'os:system'}", "unknown key 'simplify.surgery'"),
        (b"tensorrt: {plugins: [/tmp/x.so]}", "unknown key 'tensorrt.plugins'"),
        (b"name: ../../etc", "name: String should match pattern"),
        (b"name: /etc/passwd", "name: String should match pattern"),
        (b"a: &x [1]\nb: *x", "anchors and aliases (line 1)"),
        (b"[" * 50 + b"]" * 50, "deeper than 12 levels"),
        (b"[" + b"1," * 20_000 + b"]", "more than 10000 items"),
        (b"!!python/object/apply:os.system [id]", "neither YAML nor JSON"),
        (b"name: [", "neither YAML nor JSON"),
        (b"\xff\xfe", "neither YAML nor JSON"),
        (b"just words", "expected a plan of `key: value` lines, got str"),
        (b"candidate: []", "did you mean 'candidates'"),
        (b"name: a\nname: b", "duplicate key"),
    ],
)
def test_what_reaches_beyond_the_upload_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(Unprocessable) as error:
        parse(text)
    assert message in error.value.message


def test_yaml_json_and_nothing_are_read() -> None:
    assert parse(b"name: a\nprofiles: [{batch: [1, 2, 4]}]").profiles[0].dims["batch"].opt == 2
    assert parse(json.dumps({"name": "a"}).encode()).name == "a"
    assert parse(b"") == SubmittedPlan()


def test_an_onnx_with_its_data_becomes_a_plan_over_the_files(
    tmp_path: Path, settings: Settings
) -> None:
    parts = {
        "model": upload(tmp_path, "model", "../up.onnx"),
        "calibration": upload(tmp_path, "calibration", "c.npz"),
    }
    submitted = parse(
        b"name: net\ncandidates: [{backend: onnxruntime, precision: fp32}]\naccuracy: {max_drop:"
        b" 0.02}\ntensorrt: {optimization_level: 1}\nsimplify: {plain_attention: true}"
    )
    plan = plan_from(submitted, parts, settings)
    assert plan.model.path == tmp_path / "model.onnx"
    assert plan.model.path.read_bytes() == b"x"
    assert plan.data.calibration == (tmp_path / "calibration.npz",)
    assert plan.data.validation is None
    assert (plan.name, plan.accuracy.max_drop, plan.tensorrt.optimization_level) == ("net", 0.02, 1)
    assert plan.candidates[0].backend == "onnxruntime"
    assert plan.simplify.plain_attention
    assert plan_from(submitted, parts, settings) == plan  # again, as a retry does


def test_weights_become_an_architecture_of_the_list(tmp_path: Path, settings: Settings) -> None:
    pytest.importorskip("torchvision")
    text = (
        b"architecture: resnet50\nclasses: 10\ninputs: [{name: image, dtype: float32, shape:"
        b" [batch, 3, 224, 224]}]\nprofiles: [{batch: [1, 1, 8]}]"
    )
    plan = plan_from(parse(text), {"model": upload(tmp_path, "model", "w.safetensors")}, settings)
    assert plan.model.entrypoint == "service.architectures:resnet50_of_10"
    assert plan.model.weights == tmp_path / "model.safetensors"


@pytest.mark.parametrize("architecture", ["resnet50", "mobilenet_v2", "vit_b_16"])
def test_saved_weights_load_into_their_architecture(
    tmp_path: Path, settings: Settings, architecture: str
) -> None:
    torch, torchvision, safetensors = (
        pytest.importorskip(name) for name in ("torch", "torchvision", "safetensors.torch")
    )
    torch.manual_seed(
        7
    )  # the plan's module draws its own weights from another seed before these are loaded
    saved = getattr(torchvision.models, architecture)(num_classes=10).state_dict()
    safetensors.save_file(saved, tmp_path / "model")
    part = Part("model", tmp_path / "model", "0" * 64, 1, "w.safetensors")
    text = (
        f"architecture: {architecture}\nclasses: 10\ninputs: [{{name: image, dtype: float32, shape:"
        " [1, 3, 224, 224]}]"
    )
    plan = plan_from(parse(text.encode()), {"model": part}, settings)
    loaded = load_module(source_from_config(plan.model, plan.profiles)).state_dict()
    assert plan.model.weights is not None
    plan.model.weights.unlink()  # up to 340 MB
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())


@pytest.mark.parametrize(
    ("filename", "name"),
    [
        ("resnet50.onnx", "resnet50"),
        ("a/../Net v2.onnx", "Net-v2"),
        (".onnx", "onnx"),
        ("", "model"),
        ("..", "model"),
        ("é" * 200, "-" * 100),
    ],
)
def test_a_plan_without_a_name_has_that_of_the_file(
    tmp_path: Path, settings: Settings, filename: str, name: str
) -> None:
    assert (
        plan_from(SubmittedPlan(), {"model": upload(tmp_path, "model", filename)}, settings).name
        == name
    )


@pytest.mark.parametrize(
    ("filename", "text", "message"),
    [
        ("w.safetensors", b"", "weights without a model"),
        ("m.pt", b"", "is a pickle"),
        ("m.pt2", b"", "is a pickle"),
        ("m.PKL", b"architecture: resnet50", "is a pickle"),
        ("w.safetensors", b"architecture: resnet5", "no architecture 'resnet5'"),
        ("w.safetensors", b"architecture: os", "no architecture 'os'"),
        ("w.safetensors", b"architecture: resnet50\nclasses: 0", "classes: 0"),
        ("m.zip", b"", "the archive is damaged"),
    ],
)
def test_what_is_no_model_says_so(
    tmp_path: Path, settings: Settings, filename: str, text: bytes, message: str
) -> None:
    with pytest.raises(Unprocessable, match=message):
        plan_from(parse(text), {"model": upload(tmp_path, "model", filename)}, settings)


def test_architectures_name_the_extra_where_it_is_missing() -> None:
    program = (
        "import sys; sys.modules['torchvision'] = None; from service.architectures import"
        " entrypoint_of; entrypoint_of('resnet50', 10)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (
        "Unprocessable: architectures need torchvision, which is not installed on this server"
        in result.stderr
    )
    assert ".[torch]" in result.stderr


def test_code_is_taken_only_where_the_service_says_so(tmp_path: Path) -> None:
    text = b"inputs: [{name: x, dtype: float32, shape: [1]}]"
    plan = plan_from(
        parse(text),
        {"model": upload(tmp_path, "model", "m.pt2")},
        Settings(home=tmp_path, allow_code=True),
    )
    assert plan.model.path == tmp_path / "model.pt2"


def test_an_architecture_is_built_with_its_classes() -> None:
    pytest.importorskip("torchvision")
    from service import architectures

    module = architectures.mobilenet_v2_of_7()
    assert module.classifier[-1].out_features == 7
    with pytest.raises(AttributeError, match="system_of_1"):
        _ = architectures.system_of_1


def test_equal_requests_have_one_identity(tmp_path: Path) -> None:
    parts = {"model": upload(tmp_path, "model", "a.onnx"), "plan": upload(tmp_path, "plan", "plan")}
    base = identity(parse(b"name: a"), parts, "me", "host")
    assert (
        identity(
            parse(b'{"name": "a"}'),
            {**parts, "plan": Part("plan", tmp_path, "f" * 64, 1, "p")},
            "me",
            "host",
        )
        == base
    )
    other = {**parts, "model": Part("model", tmp_path, "1" * 64, 1, "a.onnx")}
    assert (
        len(
            {
                base,
                identity(parse(b"name: b"), parts, "me", "host"),
                identity(parse(b"name: a"), other, "me", "host"),
            }
        )
        == 3
    )
    assert (
        len(
            {
                base,
                identity(parse(b"name: a"), parts, "you", "host"),
                identity(parse(b"name: a"), parts, "me", "other"),
            }
        )
        == 3
    )
