"""`python -m service.grpc.generate`: generate descriptors from protos/*.proto.

Needs grpcio-tools (extra `dev`).

descriptors.binpb         the messages themselves, read by service/grpc/descriptors.py
*_pb2.pyi                 their types, for mypy
model_config.binpb        Triton's ModelConfig alone, read by pipeline/report/triton.py
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
TRITON_CONFIG = FOLDER.parents[1] / "pipeline" / "report" / "model_config.binpb"


def generate(out: Path) -> None:
    """Write the files to a folder; RuntimeError if protoc fails."""
    from grpc_tools import protoc

    protos = FOLDER / "protos"
    names = sorted(file.name for file in protos.glob("*.proto"))
    service = [f"--pyi_out={out}", f"--descriptor_set_out={out / 'descriptors.binpb'}", *names]
    config = [f"--descriptor_set_out={out / TRITON_CONFIG.name}", "model_config.proto"]
    for arguments in (service, config):
        if protoc.main(["protoc", f"--proto_path={protos}", *arguments]):
            raise RuntimeError("protoc failed; its output above has the reason")
    for stub in out.glob("*_pb2.pyi"):  # protoc writes imports for files at the top level
        stub.write_text(
            stub.read_text(encoding="utf-8").replace(
                "import model_config_pb2 as", "from service.grpc import model_config_pb2 as"
            )
        )


if __name__ == "__main__":
    generate(FOLDER)
    (FOLDER / TRITON_CONFIG.name).replace(TRITON_CONFIG)
    sys.exit()
