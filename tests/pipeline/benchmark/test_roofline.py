"""What binds a row, by rows whose answer is known."""

from __future__ import annotations

import pytest

from pipeline.benchmark.roofline import bound_of, with_bounds
from pipeline.core.recipe import Precision
from pipeline.host.gpu import Peaks
from pipeline.measurement.clock import Samples
from pipeline.results.benchmarks import BenchmarkReport, LatencyRow

PEAKS = Peaks(
    device="cpu",
    source="measured",
    flops_per_s={Precision.FP32: 100e9, Precision.INT8: 400e9},
    bytes_per_s=20e9,
)


def row_of(
    compute_ms: float,
    flops: float | None,
    moved: float | None = 1.0,
    upload_ms: float = 0.0,
    host_ms: float = 0.0,
    clock: str = "host",
) -> LatencyRow:
    """A row that ran `flops` and moved `moved` bytes in so much time."""
    whole_s = (compute_ms + upload_ms + host_ms) / 1e3

    def samples(ms: float, of: str = clock) -> Samples:
        return Samples.model_validate({"values_s": (ms / 1e3,) * 3, "clock": of})

    return LatencyRow(
        sizes={"batch": 1},
        end_to_end=samples(whole_s * 1e3, "host"),
        upload=samples(upload_ms),
        compute=samples(compute_ms),
        download=samples(0.0),
        throughput_per_s=1 / whole_s,
        flops_per_s=None if flops is None else flops / whole_s,
        bytes_per_s=None if moved is None else moved / whole_s,
    )


@pytest.mark.parametrize(
    ("row", "kind", "next_step"),
    [
        (row_of(10, 0.8e9), "compute", "try int8, or a smaller model"),
        (row_of(10, 0.3e9), "compute", "slowest layers"),
        (row_of(10, 0.1e9, 0.15e9), "bandwidth", "move less"),
        (row_of(10, 0.01e9), "overhead", "fewer threads"),
        (row_of(10, 0.1e9), "overhead", "slowest layers"),
        (row_of(10, 0, 0), "overhead", "fewer threads"),
        (row_of(10, 0.01e9, clock="device"), "overhead", "CUDA graph"),
        (row_of(10, 0.8e9, upload_ms=12, clock="device"), "copies", "DLPack"),
        (row_of(0.1, 8e6, host_ms=0.2), "overhead", "more rows per call"),
        (row_of(10, 1.2e9), "unknown", "measure the peaks again on a quiet host"),
        (row_of(10, None), "unknown", "slowest layers"),
        (row_of(10, 0.8e9, None), "unknown", "slowest layers"),
    ],
)
def test_what_binds(row: LatencyRow, kind: str, next_step: str) -> None:
    bound = bound_of(row, Precision.FP32, PEAKS)
    assert bound.kind == kind
    assert next_step in bound.next_step


def test_the_sentence_holds_the_three_times() -> None:
    bound = bound_of(row_of(10, 0.8e9, 0.1e9), Precision.FP32, PEAKS)
    assert (
        bound.why
        == "computing takes 10.0 ms; at the device's peak its arithmetic 8.00 ms (fp32), its data"
        " 5.00 ms if nothing is fused"
    )
    assert bound.share_of_peak_flops == pytest.approx(0.8)
    assert bound.share_of_peak_bytes == pytest.approx(0.5)


def test_a_narrower_precision_has_its_own_peak_and_moves_less() -> None:
    bound = bound_of(row_of(10, 3.2e9, 0.1e9), Precision.INT8, PEAKS)
    assert bound.kind == "compute"
    assert bound.share_of_peak_flops == pytest.approx(0.8)
    assert bound.share_of_peak_bytes == pytest.approx(0.125)
    assert "narrowest" in bound.next_step


def test_over_half_of_the_peak_is_compute_even_if_unfused_bytes_take_longer() -> None:
    bound = bound_of(row_of(10, 0.6e9, 0.4e9), Precision.FP32, PEAKS)
    assert bound.kind == "compute"
    assert bound.share_of_peak_bytes == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("peaks", "clock", "why", "next_step"),
    [
        (
            None,
            "host",
            "this device's peak rates are not known",
            "the next compile on a quiet host",
        ),
        (None, "device", "this device's peak rates are not known", "python -m benchmarks peak"),
        (PEAKS, "host", "the bf16 peak of this device is not known", "crucible doctor --measure"),
        (
            PEAKS.model_copy(update={"bytes_per_s": None}),
            "host",
            "this device's peak rates are not known",
            "the next compile on a quiet host",
        ),
    ],
)
def test_without_a_peak_there_is_no_share_and_a_way_to_get_it(
    peaks: Peaks | None, clock: str, why: str, next_step: str
) -> None:
    bound = bound_of(row_of(10, 0.8e9, clock=clock), Precision.BF16, peaks)
    assert (bound.kind, bound.share_of_peak_flops, bound.why) == ("unknown", None, why)
    assert next_step in bound.next_step


def test_copies_are_told_without_peaks() -> None:
    assert (
        bound_of(row_of(1, 1e6, upload_ms=5, clock="device"), Precision.FP16, None).kind == "copies"
    )


def test_every_row_of_a_report_gets_its_bound() -> None:
    report = BenchmarkReport(label="engine", rows=(row_of(10, 0.8e9), row_of(10, 0.01e9)))
    assert [
        row.bound.kind for row in with_bounds(report, Precision.FP32, PEAKS).rows if row.bound
    ] == ["compute", "overhead"]
