"""Faults of the host, and a tenant with many jobs. The jobs' worker is a double that does what the
job's name says.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from tests.attack.expect import expect
from tests.attack.record import NotRun
from tests.attack.targets import Server, Targets, is_root, started
from tests.service.builders.app import model_bytes, parts
from tests.service.builders.jobs import write_out

DISK_BYTES = 8 * 2**20
JOBS, PATIENCE_S = 1000, 20.0
KILLED_JOBS = 5


def full_disk(targets: Targets) -> str:
    """Fill the disk with an upload, and then to the last byte; then free it."""
    folder = targets.folder / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if not is_root() or subprocess.run(words, capture_output=True, check=False).returncode:
        raise NotRun("only root can mount a small file system")
    try:
        with _doubled(folder, disk_reserve_bytes=0) as server:
            large = _post(server, "succeed", bytes(2 * DISK_BYTES))
            expect(large.status_code == 507, f"a large upload: {large.text[:200]}")
            ballast = folder / "ballast"
            with suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            small = _post(server, "succeed", model_bytes("full"))
            expect(small.status_code == 507, f"a small upload: {small.text[:200]}")
            ballast.unlink()
            job = _post(server, "succeed", model_bytes("free"))
            expect(job.status_code == 202, f"with space again: {job.text[:200]}")
            state = server.ended(job.json()["id"])["state"]
            damage = server.damage()
        expect(state == "succeeded" and not damage, f"the next job {state}; {damage}")
        return "507 twice; with space again, the next job succeeds"
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def kill_9(targets: Targets) -> str:
    """Kill the server with SIGKILL while a job runs and others wait, and start it again."""
    home = targets.folder / "killed"
    with _doubled(home) as server:
        names = [f"succeed-{2 if number == 0 else 0}" for number in range(KILLED_JOBS)]
        jobs = [
            _post(server, name, model_bytes(f"k{number}")).json()["id"]
            for number, name in enumerate(names)
        ]
        with server.client() as client:
            while client.get(f"/jobs/{jobs[0]}").json()["state"] == "queued":
                time.sleep(0.05)
        server.process.kill()
        server.process.wait()
        key = server.keys["attacker"]
    with _doubled(home) as server:
        server.keys["attacker"] = key
        states = [server.ended(job)["state"] for job in jobs]
    expect(set(states) == {"succeeded"}, f"the jobs {states}")
    return f"all {len(jobs)} jobs succeed after the restart"


def flood_of_jobs(targets: Targets) -> str:
    """Queue 1000 jobs of one tenant, and then one of another."""
    with _doubled(targets.folder / "flood", log_level="warning") as server:
        with server.client("attacker") as client:
            queued = [
                client.post("/compile", files=parts("succeed-0.5", model_bytes(str(number))))
                for number in range(JOBS)
            ]
        accepted = [answer for answer in queued if answer.status_code == 202]
        expect({answer.status_code for answer in queued} <= {202, 429}, "other refusals")
        job = _post(server, "succeed", model_bytes("v"), "victim").json()
        end = time.monotonic() + PATIENCE_S
        with server.client("admin") as client:
            while (mine := client.get(f"/jobs/{job['id']}").json())["started"] is None:
                expect(
                    time.monotonic() < end,
                    f"behind {len(accepted)} jobs, the other job waits for over {PATIENCE_S:.0f} s",
                )
                time.sleep(0.1)
            others = [client.get(f"/jobs/{each.json()['id']}").json() for each in accepted[:100]]
    before = [
        each for each in others if job["created"] <= (each["started"] or "z") < mine["started"]
    ]
    expect(len(before) <= 1, f"{len(before)} jobs began before the other one")
    return f"{len(accepted)} jobs wait; the other tenant's begins after {len(before)} of them"


def _doubled(home: Path, **settings: object) -> AbstractContextManager[Server]:
    """Return a server whose jobs are doubles."""
    home.mkdir(exist_ok=True)
    if not (home / "template").exists():
        write_out(home / "template", home / "template-store")
    return started(home, ("tests.service.serving", str(home)), **settings)


def _post(server: Server, name: str, model: bytes, tenant: str = "attacker") -> Any:
    with server.client(tenant) as client:
        return client.post("/compile", files=parts(name, model))
