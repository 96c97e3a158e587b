"""`make image-test`: the `serve` image is built and does its work, alone on its volume.

Not collected with the other tests: they need neither root nor minutes.
"""

import io
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray

from service.client import Client, Upload
from service.sandbox.process_tree import of_jobs
from tests.builders.cli import FEATURES, answers, environment, write_task
from tests.docker.fixtures_image import (
    SERVE,
    WITHIN_S,
    Container,
    Image,
    Images,
    lacking,
    running,
    until,
)
from tests.service.integration.test_docs import (
    SHELL,
    TUTORIAL,
    URL,
    commands,
    container_commands,
    is_server,
    overridden,
    write_tutorial,
)

pytestmark = pytest.mark.skipif(
    bool(lacking()), reason=f"the image is not tested here: {lacking()}"
)
HOME = "/var/lib/crucible"
X = np.random.default_rng(0).normal(0, 1, (3, FEATURES)).astype(np.float32)


@pytest.fixture(scope="module")
def image(builder: Images) -> Image:
    image = builder.build(SERVE)
    sizes = [size / 10**6 for size in (image.size_bytes, builder.size_bytes("localhost/base"))]
    print("\nthe image has {:.0f} MB, {:.0f} of them the base".format(*sizes))
    return image


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder whose `home` outlives a container."""
    return tmp_path_factory.mktemp("volume")


@pytest.fixture(scope="module")
def container(image: Image, key: Path, place: Path) -> Iterator[Container]:
    with running(image, place / "home", key, place / "view") as container:
        resident = sum(
            process.memory_info().rss for process in container.init.children(recursive=True)
        )
        print(
            f"\nthe container is ready after {container.ready_s:.1f} s, and holds"
            f" {resident / 10**6:.0f} MB"
        )
        yield container


@pytest.fixture
def client(container: Container, key: Path) -> Iterator[Client]:
    with Client(container.url, key.read_text()) as client:
        yield client


def uploaded(folder: Path, name: str) -> Upload:
    """The tiny task; jobs of another name are other jobs."""
    write_task(folder)
    (folder / "plan.yaml").write_text(
        f"{{name: {name}, profiles: [{{batch: [1, 4, 16]}}], accuracy: {{metric: top1, max_drop:"
        " 0.03}, candidates: [{backend: onnxruntime, precision: fp32}], benchmark:"
        " {duration_s: 0.3, warmup_s: 0.05}}"
    )
    return Upload(
        folder / "model.onnx",
        folder / "plan.yaml",
        *(folder / f"{role}.npz" for role in ("calibration", "selection", "validation")),
    )


def test_the_image_says_how_it_runs(image: Image) -> None:
    assert image.user == "10001:10001"
    assert image.command == ("/usr/bin/tini", "--", "crucible", "serve")
    assert image.volumes == (HOME,)
    packages = {path.name for path in image.root.glob("opt/crucible/lib/python3*/site-packages/*")}
    assert "onnxruntime" in packages
    assert not packages & {"torch", "openvino", "pytest", "pip"}


def test_only_the_volume_can_be_written(container: Container) -> None:
    tried = container.run(
        "sh", "-c", f"id -u; touch /tmp/x /opt/x {HOME}/x; df -k --output=size /dev/shm"
    )
    assert tried.stdout.split() == ["10001", "1K-blocks", "1024"]
    assert tried.stderr.count("Read-only file system") == 2


def test_the_commands_of_docker_exec_run(container: Container) -> None:
    assert "admin key from a file" in container.run("crucible", "keys", "list").stdout
    assert "onnxruntime" in container.run("crucible", "doctor").stdout


def test_the_healthcheck_tells(container: Container) -> None:
    assert container.run(*container.image.healthcheck).returncode == 0
    elsewhere = container.run("env", "CRUCIBLE_SERVICE_PORT=1", *container.image.healthcheck)
    assert "Connection refused" in elsewhere.stderr


def test_without_the_key_nothing_is_told(container: Container) -> None:
    assert httpx.get(f"{container.url}/jobs").status_code == 401


def test_a_killed_job_fails_and_its_retry_gives_a_report(
    container: Container, client: Client, tmp_path: Path
) -> None:
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
    assert report.verdict != "rejected", report.reasons  # which of two is faster, this host decides
    assert report.has_engine


def test_the_tutorial_leads_to_answers(
    container: Container, client: Client, key: Path, tmp_path: Path
) -> None:
    """After what follows `docker run`, and with the key that a container wants."""
    write_tutorial(tmp_path)
    (tmp_path / "keys").symlink_to(key.parent)
    _, after = container_commands()
    keyed = 'curl() { command curl --fail-with-body --silent --show-error -H @auth "$@"; }'
    tutorial = [overridden(line) for line in commands(TUTORIAL) if not is_server(line)]
    script = "\n".join([SHELL, *after, keyed, *tutorial]).replace(URL, container.url)
    result = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment({"CRUCIBLE_URL": container.url}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr
    assert "demo version 1 on cpu" in result.stdout
    assert result.stdout.count('"outputs":{') == 1
    client.unload("demo")


def children(job_id: str) -> list[psutil.Process]:
    """Processes of a job that run its work: not the guardian above them, which would end the others
    by itself.
    """
    return [process for process in of_jobs([job_id]) if runs(process, "service.jobs.worker")]


def runs(process: psutil.Process, module: str) -> bool:
    return process.cmdline()[1:3] == ["-m", module]


# -- what it compiled is served ----------------------------------------------


@pytest.fixture(scope="module")
def model(container: Container, key: Path, place: Path) -> str:
    """The tiny task's winner, promoted and loaded."""
    with Client(container.url, key.read_text()) as client:
        job = client.submit(uploaded(place / "task", "served"))
        *_, last = client.events(job.id)
        assert last.kind == "succeeded", last.data
        batch = client.promote("tiny", job.id).current.batch
        assert (batch.proved, batch.maximum) == (True, 16)
        held = client.load("tiny").deployment.memory_bytes
    (worker,) = workers(container)
    guardian = worker.parent()
    assert held is not None
    assert guardian is not None
    alone = [size / 10**6 for size in (held, guardian.memory_full_info().uss)]
    print(
        "\nthe process of a served tiny model holds {:.0f} MB that no other shares (memory_bytes),"
        " its guardian {:.0f} MB".format(*alone)
    )
    return "tiny"


def workers(container: Container) -> list[psutil.Process]:
    """Processes that hold an engine: not their guardians."""
    return [
        child
        for child in container.init.children(recursive=True)
        if runs(child, "service.serving.worker")
    ]


def npy(array: NDArray[np.float32]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def post(web: httpx.Client, container: Container, model: str) -> httpx.Response:
    return web.post(
        f"{container.url}/models/{model}/infer",
        content=npy(X),
        headers={"Content-Type": "application/x-npy"},
        timeout=WITHIN_S,
    )


def is_right(answer: httpx.Response) -> bool:
    """The class of each row is the one that the model itself gives."""
    return bool((np.load(io.BytesIO(answer.content)).argmax(1) == answers(X)).all())


def test_it_answers_curl(container: Container, model: str, key: Path, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(npy(X))
    (tmp_path / "auth").write_text(f"Authorization: Bearer {key.read_text().strip()}")
    curl = (
        "curl",
        "--fail-with-body",
        "--silent",
        "--show-error",
        "-H",
        "@auth",
        "-H",
        "Content-Type: application/x-npy",
    )
    command = [
        *curl,
        f"{container.url}/models/{model}/infer",
        "--data-binary",
        "@x.npy",
        "-o",
        "y.npy",
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy").argmax(1), answers(X))


@pytest.mark.parametrize("wire", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def test_it_answers_tritonclient(container: Container, model: str, key: Path, wire: Any) -> None:
    address = container.rpc if wire is tritonclient.grpc else container.url.removeprefix("http://")
    headers = {"authorization": f"Bearer {key.read_text().strip()}"}
    with wire.InferenceServerClient(address) as client:
        tensor = wire.InferInput("x", list(X.shape), "FP32")
        tensor.set_data_from_numpy(X)
        answer = client.infer(model, [tensor], headers=headers)
    np.testing.assert_array_equal(answer.as_numpy("y").argmax(1), answers(X))


def test_a_killed_model_worker_is_replaced(container: Container, model: str, key: Path) -> None:
    (killed,) = workers(container)
    killed.kill()
    killed.wait()
    with httpx.Client(headers={"Authorization": f"Bearer {key.read_text().strip()}"}) as web:
        until(lambda: post(web, container, model).status_code == 200, container.log)
        assert is_right(post(web, container, model))
    (other,) = workers(container)
    assert other.pid != killed.pid


def test_sigterm_under_load_loses_nothing(
    container: Container, model: str, client: Client, key: Path, place: Path, tmp_path: Path
) -> None:
    """The last test of this container. Requests that it has taken are answered; those that come
    later are told that it stops.
    """
    lines: list[str] = []
    statuses: set[int] = set()
    inferred: Counter[str] = Counter()
    leaving = threading.Event()
    headers = {"Authorization": f"Bearer {key.read_text().strip()}"}
    job = client.submit(uploaded(tmp_path, "drained"))
    until(lambda: client.job(job.id).state == "running", container.log)

    def follow() -> None:
        with httpx.stream(
            "GET", f"{container.url}/jobs/{job.id}/events", headers=headers, timeout=None
        ) as answer:
            for line in answer.iter_lines():
                lines.append(line)

    def ask() -> None:
        while container.answers("/readyz"):  # as a load balancer does
            statuses.add(httpx.get(f"{container.url}/jobs", headers=headers).status_code)
        leaving.set()

    def infer() -> None:
        with httpx.Client(headers=headers) as web:
            while not leaving.is_set():
                answer = post(web, container, model)
                inferred[
                    (
                        ("right" if is_right(answer) else "wrong")
                        if answer.status_code == 200
                        else answer.text
                    )
                ] += 1

    threads = [threading.Thread(target=target) for target in (follow, *[ask] * 2, *[infer] * 8)]
    for thread in threads:
        thread.start()
    until(lambda: bool(lines) and bool(statuses) and inferred["right"] > 100, container.log)
    container.terminate()
    for thread in threads:
        thread.join()
    assert container.process.wait(WITHIN_S) == 0, container.log.read_text()
    assert statuses == {200}
    assert inferred.pop("right") > 100
    refused = (
        "is draining",
        "the server is stopping",
    )  # not "ended before", which a request hears that was taken and is dropped
    assert [message for message in inferred if not any(why in message for why in refused)] == []
    assert "event: server-restarting" in lines
    assert of_jobs([job.id]) == []

    with (
        running(container.image, place / "home", key, place / "view") as restarted,
        Client(restarted.url, key.read_text()) as client,
    ):
        kinds = [event.kind for event in client.events(job.id)]
        assert kinds.count("running") > 1
        assert kinds[-1] == "succeeded"
        with httpx.Client(headers=headers) as web:
            assert is_right(post(web, restarted, model))  # loaded again by itself
