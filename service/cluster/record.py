"""The record of a node's process: a file from which whoever starts nodes on a host knows the one
that runs there.

The node writes it, before it claims a job. The last one to write it stays: a node that finds
another one in its record ends.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
from pydantic import ValidationError

from pipeline.core.frozen import Frozen
from service.sandbox.process_tree import alive, started_at


class NodeRecord(Frozen):
    """A node, and its process on this host."""

    node: str  # its id in the database, new at each start
    pid: int
    started_s: float  # since 1970; another process may get the same pid later

    @classmethod
    def of_this_process(cls, node: str) -> NodeRecord:
        return cls(node=node, pid=os.getpid(), started_s=started_at(os.getpid()))

    def process(self) -> psutil.Process | None:
        """Return the process; None if it has ended."""
        return next(iter(alive(self.pid, self.started_s)), None)


def write_record(file: Path, record: NodeRecord) -> None:
    """Replace the record of a file in one step."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}-{record.node}")
    temporary.write_text(record.model_dump_json(), encoding="utf-8")
    temporary.replace(file)


def read_record(file: Path) -> NodeRecord | None:
    """Return the record of a file; None if there is none, or a damaged one."""
    try:
        return NodeRecord.model_validate_json(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValidationError):
        return None
