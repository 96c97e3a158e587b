"""Start the recorder before the user's script. Python imports this file by its name.

The environment is restored first: the script and its child processes see their own. A
`sitecustomize` that was there before is imported as well.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent


def _start(settings: dict[str, object]) -> None:
    # by its path: the script may have a package called `pipeline` of its own
    spec = importlib.util.spec_from_file_location("_crucible_recorder", HERE.parent / "recorder.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.start(settings)


def _import_other() -> None:
    """Import the `sitecustomize` that this one hides, if there is one."""
    ours = sys.modules.pop("sitecustomize")
    try:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("sitecustomize")
    finally:
        sys.modules.setdefault("sitecustomize", ours)


if "CRUCIBLE_RECORD" in os.environ:
    _settings = json.loads(os.environ.pop("CRUCIBLE_RECORD"))
    sys.path[:] = [folder for folder in sys.path if Path(folder) != HERE]
    os.environ.pop("PYTHONPATH")
    if _settings["python_path"] is not None:
        os.environ["PYTHONPATH"] = _settings["python_path"]
    _import_other()
    _start(_settings)
