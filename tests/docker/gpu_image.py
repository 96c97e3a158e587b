"""What a GPU image must do on a host without a GPU, for both of its tests."""

from pathlib import Path

from service.client import Client, Upload
from tests.builders.cli import write_task
from tests.docker.fixtures_image import Container

LOAD = "from pipeline.backends.tensorrt.library import import_library as load; {}"


def upload(folder: Path, backend: str) -> Upload:
    """The tiny task, with one candidate."""
    write_task(folder)
    (folder / "plan.yaml").write_text(
        f"{{name: {backend}, profiles: [{{batch: [1, 4, 16]}}], accuracy: {{metric: top1,"
        f" max_drop: 0.03}}, candidates: [{{backend: {backend}, precision: fp32}}], benchmark:"
        " {duration_s: 0.3, warmup_s: 0.05}}"
    )
    data = (folder / f"{role}.npz" for role in ("calibration", "selection", "validation"))
    return Upload(folder / "model.onnx", folder / "plan.yaml", *data)


def outcome(container: Container, key: Path, files: Upload) -> dict[str, object]:
    """The last event of a job: its kind, and its data."""
    with Client(container.url, key.read_text()) as client:
        *_, last = client.events(client.submit(files).id)
    return {"kind": last.kind, **last.data}
