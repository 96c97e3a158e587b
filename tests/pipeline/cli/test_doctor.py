from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.backends.tensorrt import library as trt_library
from pipeline.cli import doctor
from pipeline.core.recipe import Precision
from pipeline.host.gpu import Gpu, Gpus

NO_GPU = Gpus(reason="no NVIDIA driver")
H200 = Gpu(
    name="NVIDIA H200",
    uuid="GPU-6d5a129b",
    compute_capability="9.0",
    driver="580.159",
    memory_bytes=143771 * 2**20,
    sm_clock_mhz=1980,
    memory_clock_mhz=3201,
    sm_count=132,
    memory_bus_bits=6016,
)
T4 = H200.model_copy(
    update={
        "name": "Tesla T4",
        "compute_capability": "7.5",
        "sm_count": None,
        "memory_bus_bits": None,
        "memory_bytes": 0,
    }
)


def test_exactly_one_onnxruntime_is_installed() -> None:
    names = doctor.onnxruntime_distributions()
    assert len(names) == 1, f"expected one distribution of onnxruntime, found {names}"


def test_examine_tells_of_every_backend(tmp_path: Path) -> None:
    report = doctor.examine(tmp_path / "not" / "there")
    checks = {check.name: check for check in report.backends}
    assert {"onnxruntime", "openvino", "tensorrt_rtx", "tensorrt", "pytorch"} <= set(checks)
    assert checks["onnxruntime"].runs
    assert {Precision.FP32, Precision.INT8, Precision.INT4} <= set(checks["onnxruntime"].builds)
    assert Precision.FP16 not in checks["onnxruntime"].builds
    assert all(check.runs or check.reason for check in report.backends)
    assert all(check.builds or check.install for check in report.backends)
    assert report.store_free_bytes > 0
    assert not report.store.exists()
    assert doctor.Doctor.model_validate_json(report.model_dump_json()) == report


def test_lines_show_host_backends_and_problems(tmp_path: Path) -> None:
    checks = (
        doctor.BackendCheck(
            name="openvino", version="2026.4", builds=(Precision.FP32, Precision.INT8), runs=True
        ),
        doctor.BackendCheck(name="tensorrt", reason="no NVIDIA driver", install="pip install it"),
    )
    report = doctor.examine(tmp_path).model_copy(
        update={
            "backends": checks,
            "gpus": (),
            "no_gpu": "no NVIDIA driver",
            "problems": ("the disk is full",),
        }
    )
    text = "\n".join(doctor.lines(report))
    assert re.search(r"^GPU +none: no NVIDIA driver$", text, re.MULTILINE)
    assert re.search(r"^openvino +2026.4: builds fp32, int8; runs here$", text, re.MULTILINE)
    assert re.search(
        r"^tensorrt +not available: no NVIDIA driver\n +-> pip install it$", text, re.MULTILINE
    )
    assert re.search(r"^PROBLEM +the disk is full$", text, re.MULTILINE)


def test_every_kind_of_gpu_shows_its_peaks_and_what_tensorrt_can_do(tmp_path: Path) -> None:
    other = H200.model_copy(update={"uuid": "GPU-other"})
    checks = tuple(
        check.model_copy(
            update={"tensorrt": doctor.feature_tables(check.gpu.compute_capability, installed)}
        )
        for check, installed in zip(
            doctor.check_gpus(Gpus(devices=(H200, other, T4))),
            ("10.6.0", "10.6.0", ""),
            strict=True,
        )
    )
    report = doctor.examine(tmp_path).model_copy(update={"gpus": checks})
    assert doctor.Doctor.model_validate_json(report.model_dump_json()) == report
    text = "\n".join(doctor.lines(report))
    assert re.search(
        r"^GPU +2 x NVIDIA H200 \(compute capability 9\.0, driver 580\.159, 140\.4 GiB\)$",
        text,
        re.MULTILINE,
    )
    peaks = (
        "fp32 66.9, tf32 535, fp16 1071, bf16 1071, int8 2141, fp8 2141 TFLOP/s, dense, at 1980"
        " MHz; memory 4814 GB/s"
    )
    assert re.search(rf"^ +peak: {re.escape(peaks)}$", text, re.MULTILINE)
    assert re.search(
        r"^ +TensorRT 10\.6\.0: fp32, tf32, fp16, bf16, int8 \(Q/DQ in the graph\), int8 implicit",
        text,
        re.MULTILINE,
    )
    assert re.search(
        r"^GPU +Tesla T4 \(compute capability 7\.5, driver 580\.159\)$", text, re.MULTILINE
    )
    assert "arithmetic not known for this GPU; memory not known" in text
    assert re.search(
        r"^ +TensorRT 11\.4, if it were installed: fp32, fp16, int8", text, re.MULTILINE
    )
    assert re.search(
        r"^ +not: bf16 needs a GPU of compute capability 8\.0 or later, this one has 7\.5$",
        text,
        re.MULTILINE,
    )


def test_a_tensorrt_with_reported_wrong_answers_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trt_library, "version", lambda: "10.13.3.9")
    report = doctor.examine(tmp_path)
    (warning,) = report.warnings
    assert re.search(
        rf"^WARNING +{re.escape(warning)}$", "\n".join(doctor.lines(report)), re.MULTILINE
    )
    assert "#4813" in warning


def test_no_table_is_of_a_tensorrt_with_reported_wrong_answers() -> None:
    assert [trt_library.release_warnings(version) for version in doctor.TYPICAL_TENSORRT] == [
        (),
        (),
    ]


def test_rtx_builds_here_and_runs_elsewhere() -> None:
    check = doctor.check_backend("tensorrt_rtx", NO_GPU)
    assert check.builds == (Precision.FP32, Precision.FP16, Precision.BF16, Precision.INT8)
    assert not check.runs
    assert "no NVIDIA driver" in check.reason


@pytest.mark.parametrize(
    ("flags", "int8", "bf16"),
    [
        (
            ("amx_bf16", "amx_int8", "avx2", "avx512_vnni"),
            "native (amx_int8, avx512_vnni)",
            "native (amx_bf16)",
        ),
        (("avx2", "avx_vnni"), "native (avx_vnni)", "emulated"),
        (("avx2", "fma"), "7 bits", "emulated"),
        ((), "may be slower", "emulated"),
    ],
)
def test_cpu_flags_decide_the_advice(flags: tuple[str, ...], int8: str, bf16: str) -> None:
    advice = doctor.check_cpu(flags)
    assert int8 in advice.int8
    assert bf16 in advice.bf16


def test_amx_that_the_machine_hides_is_said() -> None:
    assert doctor.check_cpu(("amx_tile",), tiles=True).amx == ""
    assert "hides its tiles" in doctor.check_cpu(("amx_tile",), tiles=False).amx


def test_problems_name_the_next_step(tmp_path: Path) -> None:
    two = ("onnxruntime 1.31.1", "onnxruntime-gpu 1.31.1")
    assert list(doctor.find_problems(two[:1], tmp_path, 2**40)) == []
    overwritten, full = doctor.find_problems(two, tmp_path, 2**30)
    assert "onnxruntime-gpu 1.31.1" in overwritten
    assert "uninstall" in overwritten
    assert "1.0 GiB free" in full
    assert "CRUCIBLE_HOME" in full
    (missing,) = doctor.find_problems((), tmp_path, 2**40)
    assert "pip install" in missing
