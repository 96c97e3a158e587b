"""Code in a .pt2, on a server that takes code: what can it reach from its job?"""

from __future__ import annotations

import functools
import io
import pickle
import re
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.attack.expect import expect, refused_upload
from tests.attack.record import NotRun
from tests.attack.targets import Targets
from tests.builders.cli import environment

# Builds a program in a process of its own, because torch takes seconds and much memory.
BUILD = """
import sys, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)
    def forward(self, x):
        return self.layer(x)
torch.export.save(torch.export.export(Net().eval(), (torch.zeros(1, 16),)), sys.argv[1])
"""
# The code of the upload. The job's failure shows what a process that dies has printed.
ACTS = """
import os, socket
from pathlib import Path
home, other, pid, port, host_file = {home!r}, {other!r}, {pid}, {port}, {file!r}
def connect():
    socket.create_connection(("127.0.0.1", port), 2).close()
acts = dict(
    database=lambda: Path(home, "crucible.db").read_bytes(),
    database_write=lambda: Path(home, "crucible.db-revoked").open("a").close(),
    other_upload=lambda: Path(home, "uploads", other, "plan.json").read_text(),
    other_report=lambda: Path(home, "reports", other, "report.json").read_text(),
    passwords=lambda: Path("/etc/shadow").read_text(),
    server_signal=lambda: os.kill(pid, 0),
    server_environment=lambda: Path(f"/proc/{{pid}}/environ").read_bytes(),
    own_secret=lambda: os.environ["OPERATORS_SECRET"],
    network=connect,
)
try:
    Path(host_file).write_text("x")  # in a sandbox it may be a file of its own
except OSError:
    pass
reached = []
for name, act in acts.items():
    try:
        act()
        reached.append(name)
    except BaseException:
        pass
print(f"{{len(acts)}} acts reached [{{' '.join(reached)}}]", flush=True)
os._exit(1)
"""


class _Runs:
    """Its pickle runs code when it is loaded."""

    def __init__(self, code: str) -> None:
        self._code = code

    def __reduce__(self) -> tuple[object, tuple[str, dict[str, object]]]:
        return exec, (self._code, {})


def code_without_permission(targets: Targets) -> str:
    """Send a .pt2 with code to the server that does not take code."""
    mark = targets.folder / "mark"
    data = _program(targets, "weights", f"open({str(mark)!r}, 'w')")
    how = refused_upload(targets.server, ".pt2", targets.files("p", data, "m.pt2"), 422)
    expect(not mark.exists(), "the code ran")
    return how


def code_in_weights(targets: Targets) -> str:
    """Send a .pt2 whose weights run code that reaches for everything outside its job."""
    return _acts(targets, "weights")


def code_in_inputs(targets: Targets) -> str:
    """Send a .pt2 whose sample inputs run code that reaches for everything outside its job."""
    return _acts(targets, "sample_inputs")


def _acts(targets: Targets, place: str) -> str:
    """Run ACTS in a job. Fell if one of them reached what it wanted."""
    server, file = targets.code_server, targets.folder / f"written-by-{place}"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = ACTS.format(
            home=str(server.home),
            other=targets.job_of_code_server,
            pid=server.process.pid,
            port=listener.getsockname()[1],
            file=str(file),
        )
        program = _program(targets, place, code)
        plan = b"inputs: [{name: x, dtype: float32, shape: [1, 16]}]\noutputs: [y]"
        files = targets.files("code", program, "m.pt2") | {"plan": ("plan.yaml", plan)}
        failure = str(server.job(files)["failure"])
    match = re.search(r"(\d+) acts reached \[(.*?)\]", failure)
    reached = [*(match[2].split() if match else ()), *(["host_file"] if file.exists() else ())]
    expect(not reached, f"the code reached {', '.join(reached)}")
    if match is None:
        raise NotRun(f"the code did not run: {failure}")
    return f"the code ran, and none of its {match[1]} acts reached anything"


def _program(targets: Targets, place: str, code: str) -> bytes:
    """Return a .pt2 whose weights or sample inputs run code."""
    source = zipfile.ZipFile(io.BytesIO(_plain_program(targets.folder)))
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if place in name and not name.endswith(".json"):
                content = _pickled(code)
            elif place in name:
                content = content.replace(b'"use_pickle": false', b'"use_pickle": true')
            target.writestr(name, content)
    return data.getvalue()


@functools.cache
def _plain_program(folder: Path) -> bytes:
    path = folder / "plain.pt2"
    result = subprocess.run(
        [sys.executable, "-c", BUILD, str(path)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise NotRun(f"torch cannot export a program: {result.stderr.strip().splitlines()[-1]}")
    return path.read_bytes()


def _pickled(code: str) -> bytes:
    """Return what torch.load reads as a pickle that runs code."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_Runs(code), protocol=2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", sys.byteorder)
    return data.getvalue()
