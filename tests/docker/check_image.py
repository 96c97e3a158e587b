"""`make image-test`: the `serve` image is built and does its work, alone on its volume.

Not collected with the other tests: they need neither root nor minutes.
"""

import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from service.client import Client, Upload
from service.processes import of_jobs
from tests.docker.fixtures_image import WITHIN_S, Container, Image, built, lacking, running, until
from tests.fixtures_cli import write_task

pytestmark = pytest.mark.skipif(bool(lacking()), reason=f"the image is not tested here: {lacking()}")
HOME = "/var/lib/crucible"


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    with built("serve") as image:
        print(f"\nthe image has {image.size_bytes / 10**6:.0f} MB")
        yield image


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("key") / "admin.key"
    file.write_text(f"cru_{secrets.token_hex(5)}_{secrets.token_urlsafe(32)}\n")
    file.chmod(0o644)  # the user of the image reads it; its folder is closed
    return file


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder whose `home` outlives a container."""
    return tmp_path_factory.mktemp("volume")


@pytest.fixture(scope="module")
def container(image: Image, key: Path, place: Path) -> Iterator[Container]:
    start = time.monotonic()
    with running(image, place / "home", key, place / "view") as container:
        resident = sum(process.memory_info().rss for process in container.init.children(recursive=True))
        print(f"\nthe container is ready after {time.monotonic() - start:.1f} s, and holds {resident / 10**6:.0f} MB")
        yield container


@pytest.fixture
def client(container: Container, key: Path) -> Iterator[Client]:
    with Client(container.url, key.read_text()) as client:
        yield client


def uploaded(folder: Path, name: str) -> Upload:
    """The tiny task; jobs of another name are other jobs."""
    write_task(folder)
    (folder / "plan.yaml").write_text(
        f"{{name: {name}, profiles: [{{batch: [1, 4, 16]}}], accuracy: {{metric: top1, max_drop: 0.03}}, "
        "candidates: [{backend: onnxruntime, precision: fp32}], benchmark: {duration_s: 0.3, warmup_s: 0.05}}"
    )
    return Upload(folder / "model.onnx", folder / "plan.yaml", *(folder / f"{role}.npz" for role in ("calibration", "selection", "validation")))


def test_the_image_says_how_it_runs(image: Image) -> None:
    assert image.user == "10001:10001"
    assert image.command == ("/usr/bin/tini", "--", "crucible", "serve")
    assert image.volumes == (HOME,)
    packages = {path.name for path in image.root.glob("opt/crucible/lib/python3*/site-packages/*")}
    assert "onnxruntime" in packages
    assert not packages & {"torch", "openvino", "pytest", "pip"}


def test_only_the_volume_can_be_written(container: Container) -> None:
    tried = container.run("sh", "-c", f"id -u; touch /tmp/x /opt/x {HOME}/x; df -k --output=size /dev/shm")
    assert tried.stdout.split() == ["10001", "1K-blocks", "1024"]
    assert tried.stderr.count("Read-only file system") == 2
    assert "admin key from a file" in container.run("crucible", "keys", "list").stdout


def test_the_healthcheck_tells(container: Container) -> None:
    assert container.run(*container.image.healthcheck).returncode == 0
    elsewhere = container.run("env", "CRUCIBLE_SERVICE_PORT=1", *container.image.healthcheck)
    assert "Connection refused" in elsewhere.stderr


def test_without_the_key_nothing_is_told(container: Container) -> None:
    assert httpx.get(f"{container.url}/jobs").status_code == 401


def test_a_killed_job_fails_and_its_retry_gives_a_report(container: Container, client: Client, tmp_path: Path) -> None:
    job = client.submit(uploaded(tmp_path, "killed"))
    until(lambda: client.job(job.id).state == "running" and bool(children(job.id)), container.log)
    for process in children(job.id):
        process.kill()
    *_, last = client.events(job.id)
    assert (last.kind, last.data["code"]) == ("failed", "host.child_died")

    again = client.retry(job.id)
    *_, last = client.events(again.id)
    assert last.kind == "succeeded", last.data
    report = client.report(again.id)
    assert (report.verdict, report.winner) == ("accepted", "onnxruntime fp32")
    # Here the image is to infer, by curl and by tritonclient, once it serves what it compiled.


def children(job_id: str) -> list[psutil.Process]:
    """Processes of a job that run its work: not the guardian above them, which would end the others by itself."""
    return [process for process in of_jobs([job_id]) if "service.job_worker" in process.cmdline()]


def test_sigterm_under_load_loses_nothing(container: Container, client: Client, key: Path, place: Path, tmp_path: Path) -> None:
    """The last test of this container."""
    lines: list[str] = []
    statuses: set[int] = set()
    headers = {"Authorization": f"Bearer {key.read_text().strip()}"}
    job = client.submit(uploaded(tmp_path, "drained"))
    until(lambda: client.job(job.id).state == "running", container.log)

    def follow() -> None:
        with httpx.stream("GET", f"{container.url}/jobs/{job.id}/events", headers=headers, timeout=None) as answer:
            for line in answer.iter_lines():
                lines.append(line)

    def ask() -> None:
        while container.answers("/readyz"):  # as a load balancer does
            statuses.add(httpx.get(f"{container.url}/jobs", headers=headers).status_code)

    threads = [threading.Thread(target=target) for target in (follow, *[ask] * 4)]
    for thread in threads:
        thread.start()
    until(lambda: bool(lines) and bool(statuses), container.log)
    container.terminate()
    for thread in threads:
        thread.join()
    assert container.process.wait(WITHIN_S) == 0, container.log.read_text()
    assert statuses == {200}
    assert "event: server-restarting" in lines
    assert of_jobs([job.id]) == []

    with running(container.image, place / "home", key, place / "view") as restarted, Client(restarted.url, key.read_text()) as client:
        kinds = [event.kind for event in client.events(job.id)]
        assert kinds.count("running") > 1
        assert kinds[-1] == "succeeded"
