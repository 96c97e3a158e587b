"""Pages for operators: error codes and metrics."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

from pipeline.backends.cuda import CudaError, OutOfDeviceMemory
from pipeline.errors import CrucibleError
from service.client import Unreachable
from service.errors import answer_to
from service.grpc.statuses import status_of
from service.jobs.store import DamagedRow
from tests.docs.markdown import code, page, table
from tests.service.builders.metrics import metrics_text

ABOUT_ERRORS = """Messages say what was expected, what came and what to do next. Codes are stable:
let programs decide by them, and never by the text. The command line prints the code beside the
message. The service sends it as `code`, with `next`; over gRPC it is the metadata `crucible-code`.
A job that failed has it in `failure`. An engine that is slow or wrong is no error: it is a verdict
in the report."""
JOB_CODES = {
    "job.cancelled": "Somebody cancelled the job.",
    "job.disk": "The job's folder outgrew `job_disk_bytes`.",
    "job.interrupted": "The server died several times while the job ran.",
    "job.memory": "The job's processes needed more than `job_memory_bytes`.",
    "job.protocol": "The job's process sent what it must not send.",
    "job.no_node": "No server and no node has the device or the labels of its target.",
    "job.timeout": "The job took longer than `job_timeout_s`.",
}
"""Failures of jobs beside the codes of errors."""

ELSEWHERE = (Unreachable, DamagedRow, CudaError, OutOfDeviceMemory)
"""Errors outside of the two modules, imported here so that they count among the subclasses."""


def errors_page() -> str:
    kinds = list(documented(CrucibleError))
    assert {*ELSEWHERE} <= {*kinds}
    rows = {each.code: _row(each) for each in kinds if "code" in vars(each)}
    return page(
        "Errors",
        "the exceptions of `pipeline/errors.py` and the service",
        ABOUT_ERRORS,
        "## Codes",
        table(
            ("code", "exit code", "HTTP", "gRPC", "meaning", "next step"),
            (rows[key] for key in sorted(rows)),
        ),
        "## Codes of failed jobs",
        "A failed job has one of the codes above, or one of these:",
        table(("code", "meaning"), ((code(key), text) for key, text in JOB_CODES.items())),
    )


def documented(kind: type[CrucibleError]) -> Iterator[type[CrucibleError]]:
    """All exceptions that say the next step in their docstring."""
    if "\n\nNext: " in (inspect.cleandoc(kind.__doc__ or "")):
        yield kind
    for below in kind.__subclasses__():
        yield from documented(below)


def _row(kind: type[CrucibleError]) -> tuple[str, ...]:
    meaning, _, step = inspect.cleandoc(kind.__doc__ or "").partition("\n\nNext: ")
    answer = answer_to(kind("")) if kind is not Unreachable else None
    status = str(answer.status) if answer else ""
    grpc = code(status_of(answer).name) if answer else ""
    return code(kind.code), str(kind.exit_code), status, grpc, meaning, step[0].upper() + step[1:]


ABOUT_METRICS = """`/metrics` shows these in the text format of Prometheus. Without keys, and with a
key of the scope `metrics` or `admin`, it shows all of them. Any other key sees only those without
the label `model`. The metrics of a GPU are there where NVML finds one. Histograms have the suffixes
`_bucket`, `_sum` and `_count`."""


def metrics_page() -> str:
    return page(
        "Metrics",
        "the registry of a server that has answered one request",
        ABOUT_METRICS,
        table(("metric", "type", "labels", "meaning"), _metrics()),
    )


def _metrics() -> Iterator[tuple[str, ...]]:
    for family in text_string_to_metric_families(metrics_text()):
        if family.name.endswith("_created"):
            continue
        assert family.samples, f"{family.name} has no sample, so its labels are not known"
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
        name = family.name + ("_total" if family.type == "counter" else "")
        listed = ", ".join(label for label in labels if label != "le")
        yield code(name), family.type, listed, f"{family.documentation}."
