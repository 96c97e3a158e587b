"""A worker for engines that are PyTorch programs: `python -m service.serving.torch_worker FD`.

It runs the loop of worker.py, but loads code. The server starts it only for engines that its own
jobs have built (`promotion.check_own`).
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.artifacts import Engine
from service.serving.worker import main

if TYPE_CHECKING:
    from pipeline.backends.base import Loaded


def open_program(engine: Engine) -> Loaded:
    """Load the program."""
    from pipeline.backends.pytorch import programs as torch_programs

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), "inductor")))
    return torch_programs.load(engine)


if __name__ == "__main__":
    main(int(sys.argv[1]), open_program)
