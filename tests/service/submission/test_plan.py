"""A submitted plan reaches nothing beyond the upload, and becomes an ordinary plan."""

import json
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from pipeline.backends.pytorch.module import load_module
from pipeline.core.artifacts import TensorRTOptions
from pipeline.plan.schema import (
    AccuracyConfig,
    DataConfig,
    LabelFiles,
    ModelConfig,
    Plan,
    SimplifyConfig,
)
from pipeline.plan.source import source_from_config
from pipeline.text_inputs import TextConfig
from service.errors import Unprocessable
from service.settings import Settings
from service.submission.plan import (
    ALLOWED,
    SubmittedPlan,
    allowed_keys,
    identity,
    parse,
    plan_from,
    warnings_of,
)
from service.submission.uploads import Part

KEYS = (
    "name architecture classes inputs outputs profiles preprocess postprocess data accuracy"
    " candidates measure_profile_width advise fallback export simplify calibration tensorrt"
    " benchmark objective serving stage_timeout_s targets wait_for_node_s"
)
WORDS = b"""metric: wer
  decode: ctc_greedy
  tokens: ["", a]"""
WITH_OTHER_METRIC = {
    "mask": b"metric: sts\n  decode: mean_pool\n  mask: x",
    "max_class_drop": b"metric: f1\n  max_class_drop: 0.1",
}

REFUSED: dict[type[BaseModel], str] = {
    Plan: "model ablate keep_fp32_builds",
    ModelConfig: "path entrypoint python_path weights weights_from inputs outputs seed",
    DataConfig: "validation labels",
    LabelFiles: "selection validation",
    AccuracyConfig: "python_path",
    SimplifyConfig: "timeout_s surgery python_path",
    TensorRTOptions: "plugins",
    TextConfig: "tokenizer",
}
COMPLETE = b"""
name: n
architecture: resnet18
classes: 10
inputs: [{name: x, dtype: float32, shape: [batch], location: device, kind: static}]
outputs: [y]
profiles: [{batch: {min: 1, opt: 1, max: 1}, values: {k: {min: 1, opt: 2, max: 3}}}]
preprocess:
  x:
    scale: 1
    mean: [0]
    std: [1]
    layout: NCHW
    resize: {source: [1, 1], target: [1, 1], filter: linear}
postprocess: {y: {top_k: 1, argmax: false, axis: -1, softmax: true}}
data:
  calibration: {generate: random, samples: 1, because: test, seed: 1}
  selection: {generate: random, samples: 1, because: test, seed: 1}
accuracy:
  metric: wer
  decode: ctc_greedy
  tokens: ["", a]
  output: y
  max_drop: 0.1
  thresholds: {max_abs: 1, mean_abs: 1, min_cosine: 1, min_snr_db: 1, min_agreement: 1}
  per_output: {y: {max_abs: 1}}
candidates:
  - backend: b
    precision: int8
    method: auto
    activation: auto
    weight_bits: 8
    precision_from: auto
    quantizer: crucible
    weight_only: false
    block_size: 32
    smooth_quant: true
    placement:
      conv: true
      matmul_weight: true
      matmul_activations: true
      residual_add: true
      first_layer: true
      last_layer: true
      per_channel: true
    keep_fp32: [fc]
    compute_capability: "8.9"
    hardware_compatible: true
    version_compatible: true
    form: aoti
    mode: max-autotune
    provider: cpu
measure_profile_width: true
advise: true
fallback: true
export: {opset: 20, exporter: auto}
simplify: {enabled: true, rewrite_attention: true, rewrites: [early_rows]}
calibration: {samples: 1, batch: 1, percentile: 99, language_model: true}
tensorrt: {workspace_mib: 1, optimization_level: 1, timing_iterations: 1}
benchmark:
  sizes: [{batch: 1}]
  duration_s: 1
  budget_s: 1
  warmup_s: 1
  warmup_runs: 1
  threads: 1
  baselines: [eager]
objective: {max_latency_ms: 15}
stage_timeout_s: 60
targets: [{name: a, device: cpu, threads: 1, labels: [avx2]}]
wait_for_node_s: 1
serving:
  padding: [{input: x, axis: 1, value: 0}]
  image:
    input: x
    size: [1, 1]
    resize: 1
    colour: RGB
    layout: NCHW
    scale: 1
    mean: [0, 0, 0]
    std: [1, 1, 1]
  labels: {y: [cat]}
  packing: {axis: tokens, mask: mask, positions: positions}
  text: {input: x, mask: m, types: t, output: y, pooling: mean, normalize: true}
"""


def types_in(annotation: object) -> Iterator[type]:
    """All classes that an annotation names."""
    if isinstance(annotation, type):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from types_in(argument)


def sections_below(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A section and all sections within it."""
    yield section
    for field in section.model_fields.values():
        for kind in types_in(field.annotation):
            if issubclass(kind, BaseModel):
                yield from sections_below(kind)


def upload(folder: Path, name: str, filename: str, content: bytes = b"x") -> Part:
    (folder / name).write_bytes(content)
    return Part(name, folder / name, "0" * 64, len(content), filename)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


def test_the_list_of_keys_is_this() -> None:
    """A new one edits this list; think of what a stranger could do with it."""
    assert list(SubmittedPlan.model_fields) == KEYS.split()


def test_each_field_of_the_plan_is_allowed_by_name_or_refused() -> None:
    """A new field of a plan belongs to ALLOWED or, if strangers must not have it, to REFUSED."""
    allowed = {section: set(allowed_keys(section)) for section in {*sections_below(Plan)}}
    allowed[Plan] = set(SubmittedPlan.model_fields).intersection(Plan.model_fields)
    for section, keys in allowed.items():
        refused = set(REFUSED.get(section, "").split())
        assert keys.isdisjoint(refused), section
        assert keys | refused == set(section.model_fields), section
    assert set(ALLOWED) == {SubmittedPlan, *allowed} - {Plan, ModelConfig, LabelFiles}


@pytest.mark.parametrize(
    ("section", "key"),
    [(section, key) for section, keys in ALLOWED.items() for key in keys.split()],
)
def test_a_field_that_the_list_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, section: type[BaseModel], key: str
) -> None:
    text = COMPLETE.replace(WORDS, WITH_OTHER_METRIC.get(key, WORDS))
    assert parse(text).architecture == "resnet18"
    others = [other for other in allowed_keys(section) if other != key]
    monkeypatch.setitem(ALLOWED, section, " ".join(others))
    written = "profiles.0" if key == "dims" else key  # a profile is written without `dims`
    with pytest.raises(Unprocessable, match=rf"unknown key '([a-z0-9_]+\.)*{written}'"):
        parse(text)


@pytest.mark.parametrize(
    "document",
    [
        {"ablate": True},
        {"keep_fp32_builds": 6},
        {"data": {"validation": {"generate": "random", "samples": 1, "because": "test"}}},
        {"accuracy": {"python_path": "."}},
        {"simplify": {"timeout_s": 600}},
        {"simplify": {"surgery": None}},
        {"simplify": {"python_path": "."}},
        {"tensorrt": {"plugins": []}},
        {"serving": {"text": {"tokenizer": None}}},
        *({"model": {key: None}} for key in REFUSED[ModelConfig].split()),
    ],
)
def test_a_refused_field_is_an_unknown_key_even_with_its_default(document: object) -> None:
    with pytest.raises(Unprocessable, match="unknown key"):
        parse(yaml.safe_dump(document).encode())


def test_only_sets_of_samples_could_be_paths() -> None:
    """Paths are refused wherever they are; no other allowed field can hold one."""
    fields = [
        (section.__name__, key)
        for section in ALLOWED
        for key in allowed_keys(section)
        if Path in types_in(section.model_fields[key].annotation)
    ]
    assert fields == [("DataConfig", "calibration"), ("DataConfig", "selection")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"model: {path: /etc/passwd}", "unknown key 'model'"),
        (b"data: {calibration: /etc/passwd}", "data.calibration"),
        (b"data: {calibration: ../x.npz}", "data.calibration"),
        (b"data: {selection: []}", "data.selection: no path of the server is allowed"),
        (b"data: {validation: file:///etc/passwd}", "unknown key 'data.validation'"),
        (b"accuracy: {metric: 'os:system'}", "accuracy.metric is 'os:system', and this service"),
        (
            b"accuracy: {metric: f1, decode: 'os:system'}",
            "accuracy.decode is 'os:system', and this service",
        ),
        (b"accuracy: {metric: f2}", "accuracy: expected metric auto, top1"),
        (b"data: {labels: {selection: /etc/passwd}}", "`data.selection` names no .npz files"),
        (
            b"data: {selection: a.npz, labels: {selection: /etc/passwd}}",
            "unknown key 'data.labels'",
        ),
        (b"accuracy: {python_path: /tmp}", "unknown key 'accuracy.python_path'"),
        (b"simplify: {surgery: 'os:system'}", "unknown key 'simplify.surgery'"),
        (b"tensorrt: {plugins: [/tmp/x.so]}", "unknown key 'tensorrt.plugins'"),
        (b"serving: {text: {tokenizer: /etc}}", "unknown key 'serving.text.tokenizer'"),
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
        (b"rescue: true\nfallback: true", "the old name of 'fallback', which is given too"),
        (b"simplify: {rewrite_atention: true}", "did you mean 'rewrite_attention'"),
        (b"name: a\nname: b", "duplicate key"),
        (b"name: 2026-02-30", "is no value of the type"),
        (b'outputs: ["\\ud83d"]', "is no value of the type"),
        (b"classes: " + b"9" * 5000, "is no value of the type int"),
        (b"data: !!map x", "expected a mapping node"),
    ],
)
def test_what_reaches_beyond_the_upload_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(Unprocessable) as error:
        parse(text)
    assert message in error.value.message


def test_yaml_json_and_nothing_are_read() -> None:
    assert parse(b"name: a\nprofiles: [{batch: [1, 2, 4]}]").profiles[0].dims["batch"].opt == 2
    assert parse(json.dumps({"name": "a"}).encode()).name == "a"
    assert parse(json.dumps({"outputs": ["😀"]}).encode()).outputs == ("😀",)  # as two escapes
    assert parse(b"") == SubmittedPlan()


def test_old_names_of_keys_are_read_with_a_warning() -> None:
    candidate = b"candidates: [{backend: tensorrt, precision: fp16, "
    old = b"rescue: false\nsimplify: {plain_attention: false}\n" + candidate
    new = b"fallback: false\nsimplify: {rewrite_attention: false}\n" + candidate
    assert parse(old + b"realised_in: flags}]") == parse(new + b"precision_from: flags}]")
    assert [text.split("`")[1] for text in warnings_of(old + b"realised_in: flags}]")] == [
        "rescue",
        "candidates.realised_in",
        "simplify.plain_attention",
    ]
    assert warnings_of(new + b"precision_from: flags}]") == ()
    assert warnings_of(b"") == ()


def test_an_empty_submission_has_the_defaults_of_a_plan(tmp_path: Path, settings: Settings) -> None:
    plan = plan_from(SubmittedPlan(), {"model": upload(tmp_path, "model", "m.onnx")}, settings)
    assert plan == Plan(name="m", model=ModelConfig(path=tmp_path / "model.onnx"))


def test_an_onnx_with_its_data_becomes_a_plan_over_the_files(
    tmp_path: Path, settings: Settings
) -> None:
    parts = {
        "model": upload(tmp_path, "model", "../up.onnx"),
        "calibration": upload(tmp_path, "calibration", "c.npz"),
    }
    submitted = parse(
        b"name: net\ncandidates: [{backend: onnxruntime, precision: fp32}]\naccuracy: {max_drop:"
        b" 0.02}\ntensorrt: {optimization_level: 1}\nsimplify: {rewrite_attention: true}"
    )
    plan = plan_from(submitted, parts, settings)
    assert plan.model.path == tmp_path / "model.onnx"
    assert plan.model.path.read_bytes() == b"x"
    assert plan.data.calibration == (tmp_path / "calibration.npz",)
    assert plan.data.validation is None
    assert (plan.name, plan.accuracy.max_drop, plan.tensorrt.optimization_level) == ("net", 0.02, 1)
    assert plan.candidates[0].backend == "onnxruntime"
    assert plan.simplify.rewrite_attention
    assert plan_from(submitted, parts, settings) == plan  # again, as a retry does


def test_a_tokenizer_comes_with_its_section(tmp_path: Path, settings: Settings) -> None:
    model = upload(tmp_path, "model", "m.onnx")
    tokenizer = upload(tmp_path, "tokenizer", "tokenizer.json")
    submitted = parse(b"serving: {text: {pooling: cls}}")
    text = plan_from(submitted, {"model": model, "tokenizer": tokenizer}, settings).serving.text
    assert text is not None
    assert (text.file, text.pooling) == (tmp_path / "tokenizer", "cls")
    for plan, parts, alone in (
        (submitted, {"model": model}, "the section"),
        (SubmittedPlan(), {"model": model, "tokenizer": tokenizer}, "the part"),
    ):
        with pytest.raises(Unprocessable, match=f"got {alone} alone"):
            plan_from(plan, parts, settings)


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


def test_labels_are_parts_of_their_own(tmp_path: Path, settings: Settings) -> None:
    def parts(name: str = "boxes.JSON") -> dict[str, Part]:
        return {
            "model": upload(tmp_path, "model", "m.onnx"),
            "selection": upload(tmp_path, "selection", "s.npz"),
            "selection_labels": upload(tmp_path, "selection_labels", name),
        }

    submitted = parse(b"accuracy: {metric: map}")
    plan = plan_from(submitted, parts(), settings)
    assert plan.data.labels.selection == tmp_path / "selection_labels.json"
    assert plan.data.labels.selection.read_bytes() == b"x"
    assert plan.data.labels.validation is None
    assert identity(submitted, parts(), "a", "h") != identity(submitted, parts("l.jsonl"), "a", "h")
    with pytest.raises(Unprocessable) as error:
        plan_from(submitted, parts("boxes.npz"), settings)
    assert "the part 'selection_labels' is 'boxes.npz', expected a file that ends in .json" in (
        error.value.message
    )
    alone = {name: part for name, part in parts().items() if name != "selection"}
    with pytest.raises(Unprocessable, match=r"`data.selection` names no \.npz files"):
        plan_from(submitted, alone, settings)
