"""The caches that the kernel lists, on trees of files."""

from __future__ import annotations

from pathlib import Path

from pipeline.host.caches import Cache, data_caches


def write(root: Path, cpu: int, index: int, **files: str) -> None:
    folder = root / f"cpu{cpu}" / "cache" / f"index{index}"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def four_cores(root: Path) -> Path:
    """Make four cores with an L2 each, and an L3 for two of them each."""
    for cpu in range(4):
        own, pair = str(cpu), "0-1" if cpu < 2 else "2-3"
        write(root, cpu, 0, level="1", type="Data", size="32K", shared_cpu_list=own)
        write(root, cpu, 1, level="1", type="Instruction", size="32K", shared_cpu_list=own)
        write(root, cpu, 2, level="2", type="Unified", size="512K", shared_cpu_list=own)
        write(root, cpu, 3, level="3", type="Unified", size="16M", shared_cpu_list=pair)
    return root


def test_a_level_has_the_size_that_the_threads_can_use(tmp_path: Path) -> None:
    root = four_cores(tmp_path)
    everything = (Cache(name="L2", size_bytes=2**21), Cache(name="L3", size_bytes=2**25))
    assert data_caches(4, root, range(4)) == everything
    alone = (Cache(name="L2", size_bytes=2**19), Cache(name="L3", size_bytes=2**24))
    assert data_caches(1, root, range(4)) == alone
    assert data_caches(4, root, [3]) == alone


def test_what_the_kernel_leaves_out_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, level="2", type="Unified", size="", shared_cpu_list="0")
    write(tmp_path, 0, 1, level="3", type="Unified", size="8M")
    write(tmp_path, 0, 2, level="4", type="Unified", size="1X", shared_cpu_list="0")
    assert data_caches(1, tmp_path, [0]) == ()
    assert data_caches(1, tmp_path / "none", [0]) == ()
