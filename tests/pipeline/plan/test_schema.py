"""The plan: what is read, what is refused, and how a refusal reads."""

import re
from pathlib import Path

import pytest
import yaml

from pipeline.core.shapes import TensorSpec
from pipeline.errors import PlanError
from pipeline.plan.files import home, load_plan, override_plan, plan_from_document, plan_from_model
from pipeline.plan.schema import GeneratedData, LatencyLimit, Plan
from pipeline.serving_inputs import check_serving
from tests.builders.cli import crucible

MODEL = {"model": {"path": "m.onnx"}}
INT8 = {"backend": "onnxruntime", "precision": "int8"}


def test_paths_are_taken_from_the_folder_of_the_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        "model: {path: sub/m.onnx}\ndata: {calibration: a.npz, selection: [b.npz, c.npz]}\n"
    )
    plan = load_plan(tmp_path / "plan.yaml")
    assert plan.name == "plan"
    assert plan.model.path == tmp_path / "sub" / "m.onnx"
    assert plan.data.calibration == (tmp_path / "a.npz",)
    assert plan.data.selection == (tmp_path / "b.npz", tmp_path / "c.npz")


def test_an_onnx_file_alone_is_a_plan(tmp_path: Path) -> None:
    plan = plan_from_model(tmp_path / "my model.onnx", ["accuracy.max_drop=0.5"])
    assert (plan.name, plan.accuracy.max_drop) == ("my-model", 0.5)
    assert plan_from_model(tmp_path / ".modèle.onnx").name == "mod-le"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({**MODEL, "acuracy": {}}, "unknown key 'acuracy': did you mean 'accuracy'"),
        ({"model": {"path": "m.onnx", "wieghts": 1}}, "did you mean 'weights'"),
        (
            {
                **MODEL,
                "candidates": [{"backend": "onnxruntime", "precision": "fp32", "methud": "auto"}],
            },
            "did you mean 'method'",
        ),
        ({**MODEL, "accuracy": {"thresholds": {"max_absolute": 1}}}, "did you mean 'max_abs'"),
        ({**MODEL, "simplify": {"rewrite_atention": 1}}, "did you mean 'rewrite_attention'"),
        ({**MODEL, "simplify": {"plain_atention": 1}}, "did you mean 'rewrite_attention'"),
        (
            {**MODEL, "rescue": True, "fallback": True},
            "unknown key 'rescue': it is the old name of 'fallback', which is given too",
        ),
        (
            {**MODEL, "candidates": [{**INT8, "precision_from": "graph", "realised_in": "graph"}]},
            "unknown key 'candidates.0.realised_in': it is the old name of 'precision_from'",
        ),
        ({**MODEL, "xyz": 1}, "expected one of"),
        (
            {**MODEL, "profiles": [{"batch": [4, 2, 1]}]},
            "expected min <= opt <= max, got min 4, opt 2, max 1",
        ),
        ({**MODEL, "accuracy": {"max_drop": -1}}, "greater than or equal to 0 (got -1)"),
        ({**MODEL, "candidates": [{"backend": "onnxruntime", "precision": "fp13"}]}, "'fp32'"),
        (
            {**MODEL, "candidates": [{**INT8, "keep_fp32": "fc"}]},
            "candidates.0.keep_fp32: Input should be 'auto' (got 'fc')",
        ),
        (
            {**MODEL, "candidates": [{**INT8, "keep_fp32": [1]}]},
            "candidates.0.keep_fp32.0: Input should be a valid string (got 1)",
        ),
        (
            {**MODEL, "candidates": [{**INT8, "keep_fp32": None}]},
            "candidates.0.keep_fp32: Input should be a list",
        ),
        (
            {**MODEL, "keep_fp32_builds": 0},
            "keep_fp32_builds: Input should be greater than or equal to 1 (got 0)",
        ),
        (
            {
                **MODEL,
                "candidates": [
                    {"backend": "onnxruntime", "precision": "int8", "method": ["entropy", "magic"]}
                ],
            },
            "candidates.0.method.1: Input",
        ),
        (
            {
                **MODEL,
                "candidates": [{"backend": "onnxruntime", "precision": "int8", "method": []}],
            },
            "candidates.0.method: Tuple should have at least 1",
        ),
        (
            {
                **MODEL,
                "candidates": [
                    {
                        "backend": "onnxruntime",
                        "precision": "int8",
                        "placement": {"last_layer": [True, "perhaps"]},
                    }
                ],
            },
            "candidates.0.placement.last_layer.1: Input should be a valid boolean",
        ),
        (
            {
                **MODEL,
                "candidates": [
                    {
                        "backend": "onnxruntime",
                        "precision": "int8",
                        "placement": {"last_later": True},
                    }
                ],
            },
            "did you mean 'last_layer'",
        ),
        ({"model": {}}, "exactly one of `path` and `entrypoint`"),
        (
            {"model": {"path": "m.onnx", "entrypoint": "a:b"}},
            "exactly one of `path` and `entrypoint`",
        ),
        ({"model": {"entrypoint": "a"}}, "module:function"),
        (
            {
                "model": {
                    "entrypoint": "a:b",
                    "inputs": [{"name": "x", "dtype": "float32", "shape": [1]}],
                }
            },
            "weights_from",
        ),
        ({"model": {"entrypoint": "a:b", "weights": "w"}}, "`inputs` is needed"),
        ({"model": {"path": "m.tflite"}}, ".onnx or .pt2"),
        (
            {**MODEL, "data": {"calibration": {"generate": "random", "samples": 5}}},
            "data.calibration.because: Field required",
        ),
        (
            {**MODEL, "data": {"calibration": [1]}},
            "data.calibration.0: Input is not a valid path (got 1)",
        ),
        (
            {**MODEL, "simplify": {"surgery": ":run"}},
            "simplify: expected surgery `module:function`, got ':run'",
        ),
        (
            {**MODEL, "simplify": {"surgery": "fix:"}},
            "simplify: expected surgery `module:function`, got 'fix:'",
        ),
        ({**MODEL, "profiles": {"batch": [1, 2, 4]}}, "profiles: Input should be a list"),
        (
            {**MODEL, "profiles": [{"batch": [1, 2]}]},
            "profiles.0.batch: expected [min, opt, max], got [1, 2]",
        ),
        (
            {**MODEL, "profiles": [{"batch": [0, 0, 0]}]},
            "profiles.0.batch.opt: Input should be greater than or equal to 1",
        ),
        (
            {**MODEL, "objective": "speed"},
            "objective: expected latency, throughput or {max_latency_ms: 15} (got 'speed')",
        ),
        (
            {**MODEL, "objective": {"max_latency_ms": 0}},
            "objective.max_latency_ms: Input should be greater than 0 (got 0)",
        ),
        ({**MODEL, "objective": {"max_latency": 15}}, "did you mean 'max_latency_ms'"),
        ({**MODEL, "name": ".."}, "name: String should match pattern"),
        (
            {**MODEL, "accuracy": {"metric": "top0"}},
            "expected metric auto, top1, top5, f1, map, wer, spearman, sts, perplexity, cosine,"
            " agreement or module:function, got 'top0'",
        ),
        ([1, 2], "expected a plan of `key: value` lines, got list"),
        ("text", "got str"),
        (None, "the plan is empty"),
    ],
)
def test_a_bad_plan_is_refused_with_a_sentence(
    tmp_path: Path, document: object, words: str
) -> None:
    with pytest.raises(PlanError) as error:
        plan_from_document(document, tmp_path)
    assert words in error.value.message
    assert error.value.next_step


OLD_NAMES = """
model: {path: m.onnx}
rescue: false
keep_builds: 3
simplify: {plain_attention: false}
candidates:
  - {backend: tensorrt, precision: fp16, realised_in: flags}
  - {backend: tensorrt, precision: int8, realised_in: flags}
"""
NEW_NAMES = """
model: {path: m.onnx}
fallback: false
keep_fp32_builds: 3
simplify: {rewrite_attention: false}
candidates:
  - {backend: tensorrt, precision: fp16, precision_from: flags}
  - {backend: tensorrt, precision: int8, precision_from: flags}
"""


def test_old_names_of_keys_give_the_same_plan_and_one_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plan.yaml").write_text(NEW_NAMES)
    plan = load_plan(tmp_path / "plan.yaml")
    assert caplog.messages == []
    (tmp_path / "plan.yaml").write_text(OLD_NAMES)
    assert load_plan(tmp_path / "plan.yaml") == plan
    assert sorted(caplog.messages) == [
        f"plan 'plan': `{old}` is now called `{new}`; the old name still works"
        for old, new in (
            ("candidates.realised_in", "candidates.precision_from"),
            ("keep_builds", "keep_fp32_builds"),
            ("rescue", "fallback"),
            ("simplify.plain_attention", "simplify.rewrite_attention"),
        )
    ]


def test_stored_plans_keep_the_old_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_from_document(yaml.safe_load(NEW_NAMES), tmp_path)
    stored = plan.model_dump(mode="json")
    assert (stored["rescue"], stored["keep_builds"]) == (False, 3)
    assert stored["simplify"]["plain_attention"] is False
    assert stored["candidates"][0]["realised_in"] == "flags"
    assert Plan.model_validate(stored) == plan
    assert override_plan(plan, []) == plan
    assert caplog.messages == []


@pytest.mark.parametrize("written", ["plain_attention", "rewrite_attention"])
@pytest.mark.parametrize("override", ["plain_attention", "rewrite_attention"])
def test_an_override_replaces_the_value_under_either_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, written: str, override: str
) -> None:
    document = {**MODEL, "simplify": {written: True}}
    plan = plan_from_document(document, tmp_path, overrides=[f"simplify.{override}=false"])
    assert not plan.simplify.rewrite_attention
    assert len(caplog.messages) == (override == "plain_attention")


def test_the_command_shows_the_warning_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(OLD_NAMES)
    result = crucible("compile", "plan.yaml", "--out", "out", cwd=tmp_path)
    assert result.err.splitlines()[0] == (
        "plan 'plan': `rescue` is now called `fallback`; the old name still works"
    )
    assert result.out == ""


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        plan_from_document({**MODEL, "nmae": "x", "accuracy": {"max_drop": "much"}}, tmp_path)
    assert "nmae" in error.value.message
    assert "accuracy.max_drop" in error.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "not valid YAML"),
        ("name: a\nname: b", "duplicate key 'name'"),
        ("\x00", "not valid YAML"),
        ("name: 2026-02-30", "'2026-02-30' is no value of the type timestamp"),
        ("name: !!timestamp x", "'x' is no value"),
        ("name: !!bool x", "'x' is no value of the type bool"),
        ("name: !!int ''", "'' is no value"),
        ('name: "\\ud83d"', r"'\\ud83d' is no value"),
        ("seed: " + "9" * 5000, "'9{39} is no value of the type int"),
        ("data: !!map x", "expected a mapping node"),
        ("", "the plan is empty"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(PlanError, match=words):
        load_plan(tmp_path / "plan.yaml")


def test_a_missing_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no plan at .*gone\.yaml"):
        load_plan(tmp_path / "gone.yaml")


def test_overrides_reach_into_mappings_and_lists(tmp_path: Path) -> None:
    document = {**MODEL, "profiles": [{"batch": [1, 2, 4]}]}
    plan = plan_from_document(
        document,
        tmp_path,
        overrides=[
            "profiles.0.batch=[1, 1, 8]",
            "data.calibration={generate: random, samples: 3, because: test}",
        ],
    )
    assert plan.profiles[0].dims["batch"].max == 8
    assert isinstance(plan.data.calibration, GeneratedData)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("novalue", "a.b=value"),
        ("=1", "a.b=value"),
        ("a=[", "not a YAML value"),
        ("model.path.x=1", "plain value"),
        ("profiles.7.b=1", "index"),
    ],
)
def test_a_bad_override_is_refused(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_from_document({**MODEL, "profiles": []}, tmp_path, overrides=[override])


def test_a_stored_plan_can_be_overridden(tmp_path: Path) -> None:
    plan = plan_from_document({**MODEL, "profiles": [{"batch": [1, 2, 4]}]}, tmp_path)
    again = override_plan(plan, ["benchmark.duration_s=9"])
    assert again.benchmark.duration_s == 9
    assert again.model == plan.model


def test_an_objective_is_a_word_or_a_limit(tmp_path: Path) -> None:
    def objective(*overrides: str) -> object:
        return plan_from_document({**MODEL}, tmp_path, overrides=overrides).objective

    assert objective() == "latency"
    assert objective("objective=throughput") == "throughput"
    limit = objective("objective={max_latency_ms: 15}")
    assert isinstance(limit, LatencyLimit)
    assert limit.limit_s == 0.015


def test_nodes_to_keep_are_named_or_left_to_the_compile(tmp_path: Path) -> None:
    plan = plan_from_document(
        {
            **MODEL,
            "candidates": [{**INT8, "keep_fp32": "auto"}, {**INT8, "keep_fp32": ["fc", "norm*"]}],
        },
        tmp_path,
    )
    assert [candidate.keep_fp32 for candidate in plan.candidates] == ["auto", ("fc", "norm*")]
    assert override_plan(plan, []).candidates == plan.candidates
    assert override_plan(plan, ["candidates.1.keep_fp32=auto"]).candidates[1].keep_fp32 == "auto"


def test_crucible_home_moves_the_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CRUCIBLE_HOME", str(tmp_path))
    assert home() == tmp_path


def test_a_binary_file_is_no_plan_and_the_next_step_says_where_it_belongs(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(PlanError, match="not a text file") as error:
        load_plan(tmp_path / "model.pt2")
    assert "model: {path" in error.value.next_step


def test_a_python_file_is_no_plan_and_the_next_step_records_it(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("class Net: pass\n")
    with pytest.raises(PlanError, match="is a Python file") as error:
        load_plan(tmp_path / "net.py")
    assert f"crucible record -- python {tmp_path / 'net.py'}" in error.value.next_step
    assert "entrypoint: net:build" in error.value.next_step


def test_a_profile_is_overridden_as_it_is_written(tmp_path: Path) -> None:
    plan = plan_from_document(
        {**MODEL, "profiles": [{"batch": [1, 2, 4], "values": {"k": [1, 5, 10]}}]}, tmp_path
    )
    assert override_plan(plan, []) == plan
    assert override_plan(plan, ["profiles.0.batch=[1, 2, 8]"]).profiles[0].dims["batch"].max == 8
    assert override_plan(plan, ["profiles.0.values.k=[1, 5, 20]"]).profiles[0].values["k"].max == (
        20,
    )


# --- values that decide shapes, surgery, plugins ---


def test_values_are_written_one_by_one_or_as_lists(tmp_path: Path) -> None:
    document = {
        **MODEL,
        "profiles": [
            {
                "batch": [1, 8, 64],
                "values": {
                    "k": [[1], [5], [10]],
                    "n": [1, 5, 10],
                    "shape": [[1, 3], [8, 3], [64, 3]],
                },
            }
        ],
    }
    (profile,) = plan_from_document(document, tmp_path).profiles
    assert profile.values["k"] == profile.values["n"]
    assert profile.values_at("opt") == {"k": (5,), "n": (5,), "shape": (8, 3)}


def test_a_dimension_may_be_called_values(tmp_path: Path) -> None:
    plan = plan_from_document(
        {**MODEL, "profiles": [{"values": [1, 2, 4]}, {"values": {"min": 1, "opt": 2, "max": 3}}]},
        tmp_path,
    )
    assert [profile.dims["values"].max for profile in plan.profiles] == [4, 3]
    assert override_plan(plan, []) == plan


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"k": [1, 2]}, "profiles.0.values.k: expected [min, opt, max], got [1, 2]"),
        ({"k": [3, 2, 5]}, "expected min <= opt <= max, got min (3,), opt (2,), max (5,)"),
        ({"k": [[1, 1], [2, 2], [3]]}, "got min (1, 1), opt (2, 2), max (3,)"),
        ({"k": ["a", 2, 3]}, "profiles.0.values.k.min"),
    ],
)
def test_a_bad_range_of_values_is_refused(tmp_path: Path, values: object, words: str) -> None:
    with pytest.raises(PlanError) as error:
        plan_from_document({**MODEL, "profiles": [{"values": values}]}, tmp_path)
    assert words in error.value.message


def test_plugins_are_found_from_the_folder_of_the_plan_and_must_be_there(tmp_path: Path) -> None:
    document = {**MODEL, "tensorrt": {"plugins": ["lib/mine.so"]}}
    with pytest.raises(
        PlanError, match=re.escape(f"tensorrt.plugins: no file at '{tmp_path / 'lib' / 'mine.so'}'")
    ):
        plan_from_document(document, tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mine.so").touch()
    assert plan_from_document(document, tmp_path).tensorrt.plugins == (
        tmp_path / "lib" / "mine.so",
    )


def test_the_module_of_a_surgery_is_found_from_the_folder_of_the_plan(tmp_path: Path) -> None:
    plan = plan_from_document(
        {**MODEL, "simplify": {"surgery": "fix:run", "python_path": "sub"}}, tmp_path
    )
    assert plan.simplify.python_path == tmp_path / "sub"
    assert (
        plan_from_document(dict(MODEL), tmp_path).simplify.python_path == Path()
    )  # so that a plan may move without simplifying again
    with pytest.raises(PlanError, match="expected surgery `module:function`, got 'fix'"):
        plan_from_document({**MODEL, "simplify": {"surgery": "fix"}}, tmp_path)


def test_choices_of_a_candidate_are_kept_as_they_were_written(tmp_path: Path) -> None:
    named = {"backend": "onnxruntime", "precision": "int8"}
    choices = [
        {**named, "method": "minmax", "placement": {"last_layer": True}},
        {**named, "method": ["auto", "minmax"], "placement": {"conv": [True, False]}},
    ]
    plan = plan_from_document({**MODEL, "candidates": choices}, tmp_path)
    assert [
        (each.method, each.placement.last_layer, each.placement.conv) for each in plan.candidates
    ] == [
        (("minmax",), (True,), (True,)),
        (("auto", "minmax"), (False,), (True, False)),
    ]
    assert plan.model_dump(mode="json", exclude_defaults=True)["candidates"] == choices
    assert override_plan(plan, []) == plan
    assert override_plan(plan, ["candidates.1.method=entropy"]).candidates[1].method == ("entropy",)


INPUTS = (TensorSpec(name="ids", dtype="int64", shape=("n", "length")),)
OUTPUTS = (TensorSpec(name="y", dtype="float32", shape=("n", 2)),)


@pytest.mark.parametrize(
    ("serving", "message"),
    [
        (
            {"padding": [{"input": "id", "axis": 1}]},
            "serving.padding names 'id', which is no input; the model has ids",
        ),
        ({"padding": [{"input": "ids", "axis": 2}]}, "'ids' has 2 axes, there is no axis 2"),
        ({"image": {"input": "picture", "size": [8, 8]}}, "serving.image names 'picture'"),
        (
            {"labels": {"z": ["cat"]}},
            "serving.labels names 'z', which is no output; the model has y",
        ),
    ],
)
def test_how_a_model_is_served_names_what_it_has(serving: dict[str, object], message: str) -> None:
    plan = plan_from_document({**MODEL, "serving": serving}, Path())
    with pytest.raises(PlanError, match=re.escape(message)):
        check_serving(plan.serving, INPUTS, OUTPUTS)


def test_how_a_model_is_served_is_read_from_the_plan() -> None:
    serving = {
        "padding": [{"input": "ids", "axis": 1, "value": 7}],
        "labels": {"y": ["cat", "dog"]},
    }
    plan = plan_from_document({**MODEL, "serving": serving}, Path())
    check_serving(plan.serving, INPUTS, OUTPUTS)
    assert (plan.serving.padding[0].value, plan.serving.labels) == (7, {"y": ("cat", "dog")})
    with pytest.raises(PlanError, match="did you mean 'padding'"):
        plan_from_document({**MODEL, "serving": {"pading": []}}, Path())
    with pytest.raises(PlanError, match="greater than or equal to 1"):
        plan_from_document({**MODEL, "serving": {"padding": [{"input": "ids", "axis": 0}]}}, Path())


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("best", ("best",)),
        ("eager", ("eager",)),
        ([], ()),
        (
            [
                "eager",
                "traced",
                "compile",
            ],
            ("eager", "traced", "compile"),
        ),  # as plans had them before
        (["default", "compile max-autotune bf16"], ("default", "compile max-autotune bf16")),
    ],
)
def test_baselines_are_one_name_or_several(
    tmp_path: Path,
    written: object,
    names: tuple[str, ...],
) -> None:
    document = {"model": {"path": "m.onnx"}, "benchmark": {"baselines": written}}
    plan = plan_from_document(document, tmp_path)
    assert plan.benchmark.baselines == names
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize("name", ["fast", "eager int8", "traced max-autotune", "compile fp16 best"])
def test_a_baseline_of_another_name_is_refused_with_an_example(tmp_path: Path, name: str) -> None:
    document = {"model": {"path": "m.onnx"}, "benchmark": {"baselines": [name]}}
    with pytest.raises(PlanError, match="as in `compile max-autotune fp16`") as error:
        plan_from_document(document, tmp_path)
    assert name in error.value.message
