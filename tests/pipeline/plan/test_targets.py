"""Targets: which devices fulfil one, and what is refused."""

import pytest
from pydantic import TypeAdapter, ValidationError

from pipeline.plan.sections.targets import TargetConfig, Targets, requirement_from

TARGETS: TypeAdapter[tuple[TargetConfig, ...]] = TypeAdapter(Targets)
CPU = {"name": "AMD EPYC 9654", "threads": "8", "avx2": "", "onnxruntime": "1.23.2"}
H200 = {"name": "NVIDIA H200", "threads": "16", "tensorrt": "10.9.0", "driver": "570.86"}
L40 = {"name": "NVIDIA L40S", "tensorrt": "10.10.0.31"}


@pytest.mark.parametrize(
    ("target", "device", "labels", "missing"),
    [
        ("cpu", "cpu", CPU, ""),
        ("cpu", "gpu:0", H200, "cpu"),
        ("gpu", "gpu:3", H200, ""),
        ("gpu", "cpu", CPU, "gpu"),
        ("gpu:0", "gpu:0", H200, ""),
        ("gpu:0", "gpu:1", H200, "gpu:0"),
        ("gpu:h200", "gpu:1", H200, ""),
        ("gpu:NVIDIA H200", "gpu:1", H200, ""),
        ("gpu:L4", "gpu:0", L40, "gpu:L4"),
        ("gpu:L40S", "gpu:0", L40, ""),
        ("gpu:4090", "gpu:0", {"name": "NVIDIA GeForce RTX 4090"}, ""),
        ("gpu:H200", "gpu:0", {}, "gpu:H200"),
        ("cpu, avx2", "cpu", CPU, ""),
        ("cpu, avx512_vnni", "cpu", CPU, "avx512_vnni"),
        ("cpu, threads>=8", "cpu", CPU, ""),
        ("cpu, threads>=9", "cpu", CPU, "threads>=9"),
        ("cpu, threads<9, threads>=10", "cpu", CPU, "threads>=10"),
        ("gpu, tensorrt >= 10.6", "gpu:0", H200, ""),
        ("gpu, tensorrt>=10.6", "gpu:0", L40, ""),
        ("gpu, tensorrt<10.9", "gpu:0", H200, "tensorrt<10.9"),
        ("gpu, tensorrt==10.9", "gpu:0", H200, ""),
        ("gpu, tensorrt==10.8", "gpu:0", H200, "tensorrt==10.8"),
        ("gpu, openvino>=1", "gpu:0", H200, "openvino>=1"),
        ("cpu, avx2>=1", "cpu", CPU, "avx2>=1"),
        ("cpu, rack==a", "cpu", {**CPU, "rack": "a"}, ""),
        ("cpu, rack==b", "cpu", {**CPU, "rack": "a"}, "rack==b"),
    ],
)
def test_a_device_fulfils_a_target_or_lacks_a_part(
    target: str, device: str, labels: dict[str, str], missing: str
) -> None:
    assert requirement_from(target).missing(device, labels) == missing


def test_equal_requirements_have_one_text() -> None:
    written = ("cpu, avx2,threads >= 2", "cpu,threads>=2, avx2", "cpu, avx2, avx2, threads>=2")
    assert {requirement_from(text).text for text in written} == {"cpu, avx2, threads>=2"}
    target = TargetConfig(device="cpu", threads=2, labels=("avx2",))
    assert target.requirement.text == "cpu, avx2, threads>=2"


def test_targets_have_the_names_of_their_folders() -> None:
    written = ["cpu", "gpu:H200", "cpu, avx2", {"device": "cpu", "threads": 2}]
    named = [{"name": "mine", "device": "gpu:NVIDIA L4", "threads": 2}]
    titles = [target.title for target in TARGETS.validate_python(written + named)]
    assert titles == ["cpu", "gpu-H200", "cpu-avx2", "cpu-2-threads", "mine"]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (["tpu"], "expected cpu, gpu, gpu:0, or gpu: with words of the GPU's name, got 'tpu'"),
        (["gpu:"], "got 'gpu:'"),
        (["gpu:../x"], "got 'gpu:../x'"),
        ([""], "got ''"),
        (["cpu, two words"], "expected a label as NAME, .* got 'two words'"),
        (["cpu,"], "expected a label as NAME"),
        (["cpu, x>1"], "got 'x>1'"),
        (["cpu, x>="], "got 'x>='"),
        ([{"device": "cpu", "labels": ["a, b"]}], "got 'a, b'"),
        ([{"device": "cpu", "labels": ["x" * 101]}], "expected a label"),
        ([{"device": "cpu", "name": "a/b"}], "expected letters, digits, _, - or ."),
        ([{"device": "cpu", "threads": -1}], "greater than or equal to 0"),
        ([{"labels": ["a"]}], "Field required"),
        (["cpu", "cpu"], "two targets are named 'cpu': give each one a `name`"),
        ([f"gpu:{number}" for number in range(17)], "at most 16"),
    ],
)
def test_what_is_no_target_is_refused(written: list[object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TARGETS.validate_python(written)
