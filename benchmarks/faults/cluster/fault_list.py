"""The faults of a cluster: each is brought about and taken back. A fault returns the moment of its
end, by the monotonic clock.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.faults.cluster.cluster import HOSTS, Cluster, Host
from benchmarks.faults.cluster.job_worker import LONG
from benchmarks.faults.cluster.load import Load

DOWN_S = 3.0  # of PostgreSQL between its crash and its start
AWAY_S = 60.0  # of S3
CUT_S = 30.0  # longer than a lease
APART_S = 300  # two clocks
CLOCKS_S = 10.0  # of work with wrong clocks
AWAITED_S = 5.0  # in which all hosts look at a job several times
FIND_S = 60.0  # for a host that runs a job
NUMBERS = itertools.count()


class NotHeld(Exception):
    """What must hold during a fault did not hold; the message tells what happened."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`run` brings it about, and returns when it ended. NotHeld if `holds` did not."""

    name: str
    holds: str
    run: Callable[[Cluster, Load], float]
    breaks: bool = False  # connections of clients may break


def kill_server(cluster: Cluster, load: Load) -> float:
    busy(cluster, "api-1").program.kill()
    return time.monotonic()


def kill_node(cluster: Cluster, load: Load) -> float:
    busy(cluster, "node-1").program.kill()
    return time.monotonic()


def kill_proxy(cluster: Cluster, load: Load) -> float:
    cluster.proxy.kill_all()
    return time.monotonic()


def lose_all_hosts(cluster: Cluster, load: Load) -> float:
    busy(cluster, "node-2")
    for host in cluster.hosts.values():
        host.program.kill_all()
    return time.monotonic()


def restart_postgresql(cluster: Cluster, load: Load) -> float:
    cluster.postgresql.stop()
    time.sleep(DOWN_S)
    cluster.postgresql.start()
    return time.monotonic()


def lose_s3(cluster: Cluster, load: Load) -> float:
    cluster.gateway.cut(HOSTS, ["s3"])
    time.sleep(AWAY_S)
    cluster.gateway.join(HOSTS, ["s3"])
    return time.monotonic()


def cut_node(cluster: Cluster, load: Load) -> float:
    """While it runs a job that takes longer than a node may go on without the database."""
    job = load.submit(f"{LONG}-{next(NUMBERS)}", target="cpu, kind==node")
    cluster.until(lambda: cluster.jobs.get(job).state == "running", "a node's job", FIND_S)
    nodes = [host.name for host in cluster.hosts.values() if host.kind == "node"]
    name = next(name for name in nodes if job in cluster.jobs_of(name))
    end = cut(cluster, name)
    load.finish(job)
    if cluster.jobs.get(job).attempt < 2:
        raise NotHeld(f"job {job} ran once, although '{name}' was cut off")
    return end


def cut_server(cluster: Cluster, load: Load) -> float:
    return cut(cluster, "api-2")


def cut(cluster: Cluster, name: str) -> float:
    cluster.gateway.cut([name])
    time.sleep(CUT_S)
    cluster.gateway.join([name])
    return time.monotonic()


def part_clocks(cluster: Cluster, load: Load) -> float:
    """Two hosts are before the others. A job that waits for a node waits as long as it says."""
    for name, ahead_s in zip(HOSTS, itertools.cycle((APART_S // 2, -APART_S // 2))):
        set_clock(cluster, cluster.hosts[name], ahead_s)
    wait_s = APART_S // 2
    patient = load.submit(f"patient-{next(NUMBERS)}", target="cpu, absent", wait_for_node_s=wait_s)
    time.sleep(AWAITED_S)
    found = cluster.jobs.get(patient)
    load.cancel(patient)
    time.sleep(CLOCKS_S)
    for host in cluster.hosts.values():
        set_clock(cluster, host, 0)
    if found.state != "queued":
        reason = found.failure.message if found.failure else "no failure is stored"
        raise NotHeld(f"a job that may wait {wait_s} s for a node is {found.state}: {reason}")
    return time.monotonic()


def set_clock(cluster: Cluster, host: Host, ahead_s: int) -> None:
    """Restart one host, and wait for it: the others serve meanwhile."""
    starts = host.program.starts
    host.set_clock(ahead_s)
    cluster.until(lambda: host.program.starts > starts, f"a start of {host.name}", FIND_S)
    cluster.until(cluster.is_whole, f"{host.name} with its clock {ahead_s:+d} s")


def busy(cluster: Cluster, name: str) -> Host:
    """Wait until a host runs a job."""
    cluster.until(lambda: bool(cluster.jobs_of(name)), f"a job of {name}", FIND_S)
    return cluster.hosts[name]


FAULTS = (
    Fault("SIGKILL of an API server", "another host runs its job", kill_server, breaks=True),
    Fault("SIGKILL of a node", "another host runs its job", kill_node),
    Fault("SIGKILL of the proxy", "it is started again", kill_proxy, breaks=True),
    Fault("all hosts lose power", "their jobs run again", lose_all_hosts, breaks=True),
    Fault("PostgreSQL crashes", "running jobs go on", restart_postgresql),
    Fault(f"S3 is away for {AWAY_S:g} s", "jobs wait for it", lose_s3),
    Fault(
        f"a node is cut off for {CUT_S:g} s", "its job ends there, then runs elsewhere", cut_node
    ),
    Fault(f"an API server is cut off for {CUT_S:g} s", "it refuses clearly", cut_server),
    Fault(f"clocks are {APART_S} s apart", "jobs wait as long as they say", part_clocks),
)
