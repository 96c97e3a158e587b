"""Which error a failure stands for, and how a child died: real limits where the host allows them,
else what the kernel would have recorded.
"""

import errno
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from pipeline.core.progress import Progress
from pipeline.errors import (
    ChildDied,
    CrucibleError,
    DataError,
    DiskFull,
    HostError,
    InternalError,
    ModelError,
    StoreError,
)
from pipeline.execution.child_process import call_in_child
from pipeline.execution.exit_causes import (
    NEXT_STEPS,
    ExitCause,
    MemoryKills,
    crucible_error,
    how_it_died,
    memory_kills,
)

NONE, ONE = MemoryKills(0, 0), MemoryKills(1, 1)
KILLED = "was killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied", "/somewhere"),
        NotADirectoryError(20, "Not a directory", "/somewhere"),
    ],
)
def test_a_path_that_cannot_be_used_is_the_hosts_fault(error: OSError) -> None:
    result = crucible_error(error)
    assert (result.exit_code, "'/somewhere'" in result.message, bool(result.next_step)) == (
        1,
        True,
        True,
    )


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 64.0 MiB"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate"
            " memory: you tried to allocate 4 bytes."
        ),
        ModelError("ONNX Runtime cannot open this model: std::bad_alloc"),
        caused(
            StoreError("the engine cannot be opened", "its files are damaged"),
            RuntimeError("std::bad_alloc"),
        ),
        caused(
            DataError("ONNX Runtime cannot run on these inputs"),
            RuntimeError("Failed to allocate memory for requested buffer of size 9"),
        ),
    ],
)
def test_exhausted_memory_is_named_with_the_child_whatever_a_library_says(error: Exception) -> None:
    result = crucible_error(error, "build")
    assert isinstance(result, ChildDied)
    assert result.message.startswith("the child process for 'build' ran out of memory: ")
    assert crucible_error(error).message.startswith("this process ran out of memory: ")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/somewhere/file"),
        OSError(errno.EDQUOT, "Disk quota exceeded", "/somewhere/file"),
        shutil.Error(
            [("a", "b", "[Errno 28] No space left on device: '/somewhere/file'")]
        ),  # what copytree makes of it; its errno is None
        caused(ModelError("cannot write"), OSError(errno.ENOSPC, "No space left on device")),
    ],
)
def test_a_full_disk_is_named_whoever_met_it(error: Exception) -> None:
    result = crucible_error(error)
    assert isinstance(result, DiskFull)
    assert result.message.startswith("the disk is full")


@pytest.mark.parametrize(
    "error",
    [
        DataError("bad", "mend it"),
        HostError("bad host"),
        caused(ChildDied("the child died"), MemoryError()),
    ],
)
def test_our_own_errors_stay_what_they_are(error: CrucibleError) -> None:
    assert crucible_error(error) is error


def test_anything_else_is_our_bug() -> None:
    assert isinstance(crucible_error(KeyError("x")), InternalError)
    assert isinstance(
        crucible_error(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")), InternalError
    )  # another memory than the host's


@pytest.mark.parametrize(
    ("code", "before", "after", "printed", "how", "cause"),
    [
        (-9, NONE, ONE, "", "was killed by the kernel because memory ran out", ExitCause.NO_MEMORY),
        (
            -9,
            MemoryKills(None, 4),
            MemoryKills(None, 5),
            "",
            f"{KILLED}, probably because memory ran out: the kernel",
            ExitCause.NO_MEMORY,
        ),
        (
            -9,
            MemoryKills(2, 4),
            MemoryKills(2, 5),
            "",
            f"{KILLED}, probably because memory ran out: the kernel",
            ExitCause.NO_MEMORY,
        ),
        (
            -9,
            MemoryKills(),
            MemoryKills(),
            "",
            f"{KILLED}, probably because memory ran out",
            ExitCause.NO_MEMORY,
        ),
        (
            -9,
            ONE,
            ONE,
            "",
            f"{KILLED}, but the kernel reports no lack of memory",
            ExitCause.KILLED,
        ),
        (
            -6,
            NONE,
            NONE,
            "terminate called after throwing 'std::bad_alloc'",
            "ran out of memory and ended by signal 6 (SIGABRT)",
            ExitCause.NO_MEMORY,
        ),
        (
            1,
            NONE,
            NONE,
            "MemoryError",
            "ran out of memory and ended with exit code 1",
            ExitCause.NO_MEMORY,
        ),
        (
            -11,
            ONE,
            ONE,
            "noise",
            "ended by signal 11 (SIGSEGV) before it returned a result",
            ExitCause.ENDED,
        ),
        (0, NONE, ONE, "", "ended with exit code 0 before it returned a result", ExitCause.ENDED),
    ],
)
def test_a_death_is_told_with_as_much_as_is_known(
    code: int, before: MemoryKills, after: MemoryKills, printed: str, how: str, cause: ExitCause
) -> None:
    actual_cause, text = how_it_died(code, before, after, printed)
    assert text.startswith(how)
    assert actual_cause is cause


def test_each_cause_of_an_end_has_its_own_next_step() -> None:
    assert NEXT_STEPS.keys() == set(ExitCause)
    assert len(set(NEXT_STEPS.values())) == len(ExitCause)


@pytest.mark.parametrize(
    ("groups", "file", "expected"),
    [
        ("0::/job\n", "job/memory.events", MemoryKills(3, 7)),
        ("0::/\n", "memory.events", MemoryKills(3, 7)),  # in a container, its own root
        (
            "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n",
            "memory/job/memory.oom_control",
            MemoryKills(3, 7),
        ),
        ("0::/job\n", "elsewhere", MemoryKills(None, 7)),
    ],
)
def test_the_kernels_counts_are_read_from_both_versions_of_control_groups(
    tmp_path: Path, groups: str, file: str, expected: MemoryKills
) -> None:
    proc, mounted = tmp_path / "proc", tmp_path / "cgroup" / file
    (proc / "self").mkdir(parents=True)
    mounted.parent.mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups)
    (proc / "vmstat").write_text("nr_free_pages 12\noom_kill 7\n")
    mounted.write_text("low 0\noom 3\noom_kill 3\n")
    assert memory_kills(proc, tmp_path / "cgroup") == expected


def test_a_host_without_such_files_records_nothing(tmp_path: Path) -> None:
    assert memory_kills(tmp_path, tmp_path) == MemoryKills()


# -- real children -----------------------------------------------------------


def hoard(limit_bytes: int, progress: Progress) -> None:
    import numpy as np

    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    hoarded = [np.ones(1 << 20) for _ in range(limit_bytes >> 20)]
    raise AssertionError(f"{len(hoarded)} arrays fit")


def hoard_in_a_library(limit_bytes: int, progress: Progress) -> None:
    import onnxruntime
    from onnx import TensorProto, helper

    ends = [
        helper.make_tensor_value_info(name, TensorProto.INT64, [1]) for name in ("shape", "twice")
    ]
    wide = helper.make_tensor_value_info("wide", TensorProto.FLOAT, ["n"])
    graph = helper.make_graph(
        [helper.make_node("ConstantOfShape", ["shape"], ["wide"])], "g", ends[:1], [wide]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    session.run(None, {"shape": [limit_bytes]})


def abort_as_libraries_do(progress: Progress) -> None:
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.kill(os.getpid(), signal.SIGABRT)


@pytest.mark.parametrize("function", [hoard, hoard_in_a_library])
def test_a_child_over_its_limit_is_told_as_out_of_memory(function: object) -> None:
    with pytest.raises(ChildDied, match="child process for 'hoard' ran out of memory"):
        call_in_child(function, 1 << 30, name="hoard")  # type: ignore[arg-type]


def test_what_an_earlier_run_left_in_the_log_is_no_evidence(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(ChildDied, match="ran out of memory and ended by signal 6"):
        call_in_child(abort_as_libraries_do, name="abort", log=log)
    with pytest.raises(ChildDied, match="ended by signal 6") as error:
        call_in_child(abort, name="abort", log=log)
    assert "memory" not in error.value.message


def abort(progress: Progress) -> None:
    os.kill(os.getpid(), signal.SIGABRT)
