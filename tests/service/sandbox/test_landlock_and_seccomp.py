"""The layers of the sandbox, one by one: a child tries what they must prevent."""

from __future__ import annotations

import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from service.sandbox import landlock, seccomp
from service.sandbox.launch import NOT_STARTED, Confinement
from service.sandbox.layers import Layers, Sandbox
from service.storage.layout import Work

needs_landlock = pytest.mark.skipif(
    landlock.version() < landlock.MIN_VERSION, reason="this kernel has no Landlock"
)
needs_seccomp = pytest.mark.skipif(
    not seccomp.is_available(), reason="this kernel has no seccomp filters"
)
EVERYTHING = ("/",)


def output(confinement: Confinement, code: str) -> str:
    """Run Python code in a confinement, and return what it prints."""
    program = textwrap.dedent(code)
    command = confinement.command((sys.executable, "-c", program))
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@needs_landlock
def test_a_child_writes_only_its_own_folder(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    (other / "file").write_text("kept")
    code = f"""
    import os
    from pathlib import Path
    own, other = Path({str(own)!r}), Path({str(other)!r})
    (own / "a").mkdir()
    (own / "a" / "file").write_text("x")
    (own / "a" / "file").rename(own / "moved")
    open("/dev/null", "w").write("x")
    for act in (
        lambda: (other / "new").write_text("x"),
        lambda: os.truncate(other / "file", 0),
        lambda: (other / "file").unlink(),
        lambda: os.link(other / "file", own / "link"),
        lambda: os.mkfifo("/tmp/crucible-fifo"),
    ):
        try:
            act()
            print("done")
        except OSError as error:
            print(type(error).__name__)
    """
    confinement = Confinement(EVERYTHING, (str(own),), ("/dev/null",))
    errors = output(confinement, code).split()
    assert len(errors) == 5
    assert set(errors) <= {"PermissionError", "OSError"}
    assert (own / "moved").read_text() == "x"
    assert (other / "file").read_text() == "kept"


@needs_landlock
def test_a_child_reads_only_what_is_named(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    readable = ("/usr", "/lib", "/lib64", "/etc", "/proc", *map(str, sys.path[1:]), sys.prefix)
    confinement = Confinement((*readable, sys.base_prefix))
    code = f"""
    try:
        print(open({str(secret)!r}).read())
    except OSError as error:
        print(type(error).__name__)
    """
    assert output(confinement, code) == "PermissionError"


@needs_seccomp
def test_sockets_and_namespaces_are_refused_and_pairs_stay() -> None:
    code = """
    import ctypes, os, socket, subprocess
    libc = ctypes.CDLL(None, use_errno=True)
    def call(number, *arguments):
        return f"{libc.syscall(number, *arguments)} {ctypes.get_errno()}"
    for family in ("INET", "INET6", "UNIX", "NETLINK", "PACKET"):
        try:
            socket.socket(getattr(socket, f"AF_{family}"), socket.SOCK_DGRAM)
            print("open")
        except OSError as error:
            print(error.errno)
    ours, theirs = socket.socketpair()
    ours.send(b"pair")
    print(theirs.recv(9).decode())
    try:
        socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError as error:
        print(error.errno)
    print(libc.unshare(0x10000000), ctypes.get_errno())
    print(subprocess.run(["echo", "child"], capture_output=True, text=True).stdout.strip())
    """
    lines = output(Confinement(seccomp=True), code).splitlines()
    assert lines == [*["13"] * 5, "pair", "13", "-1 1", "child"]


@needs_seccomp
def test_cuda_may_listen_and_reach_nobody() -> None:
    code = """
    import os, socket
    def tried(act):
        try:
            act()
            return "done"
        except OSError as error:
            return str(error.errno)
    server, client = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in "ab")
    name = f"\\0cuda-{os.getpid()}"
    print(tried(lambda: server.bind(name)), tried(server.listen))
    print(tried(lambda: client.connect(name)))
    for family in ("INET", "INET6", "UNIX", "NETLINK", "PACKET", "VSOCK"):
        print(tried(lambda: socket.socket(getattr(socket, f"AF_{family}"), socket.SOCK_DGRAM)))
    print(tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)))
    print(tried(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)))
    """
    lines = output(Confinement(seccomp=True, gpu=True), code).split()
    assert lines == ["done", "done", *["13"] * 9]


@needs_landlock
def test_threads_can_be_named_only_where_a_gpu_is_used(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path)
    sandbox.layers = Layers(landlock=True)
    code = """
    import os
    try:
        open(f"/proc/self/task/{os.getpid()}/comm", "w").write("cuda")
        print("named")
    except OSError as error:
        print(type(error).__name__)
    """
    work = Work(tmp_path / "work")
    work.prepare()
    for device, expected in (("cpu", "PermissionError"), ("gpu:0", "named")):
        assert output(sandbox.enter("job", work, device).confinement, code) == expected


@needs_seccomp
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x32 is of x86-64")
def test_a_call_of_another_architecture_ends_the_child() -> None:
    code = "import ctypes; ctypes.CDLL(None).syscall(0x40000000 + 39)"
    command = Confinement(seccomp=True).command((sys.executable, "-c", code))
    assert subprocess.run(command).returncode < 0


def test_each_known_architecture_has_a_program() -> None:
    for machine in ("x86_64", "aarch64"):
        assert seccomp.is_known(machine)
        assert len(seccomp.program(machine)) % 8 == 0
    assert not seccomp.is_known("s390x")


def test_a_child_has_no_capabilities_and_gets_none() -> None:
    code = "print(*(l for l in open('/proc/self/status') if l[:3] in ('Cap', 'NoN')), sep='')"
    fields = dict(line.split(":\t") for line in output(Confinement(), code).split("\n") if line)
    assert fields.pop("NoNewPrivs") == "1"
    assert {int(value, 16) for value in fields.values()} == {0}


def test_what_cannot_be_confined_does_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    confinement = Confinement(control_groups=(str(tmp_path / "absent" / "cgroup.procs"),))
    command = confinement.command((sys.executable, "-c", f"open({str(ran)!r}, 'w')"))
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, ran.exists()) == (NOT_STARTED, False)
    assert "cannot confine or run" in done.stderr


def test_the_environment_can_be_replaced() -> None:
    code = "import os; print(os.environ.get('A'), os.environ.get('HOME'))"
    assert output(Confinement(environment={"A": "b"}), code) == "b None"
