"""`python -m tests.service.serving HOME [SETTING=VALUE...]`: `crucible serve` on any free port,
with doubles for the job worker and the host.

`compiles=yes` has the real worker.
"""

import os
import sys

from service.jobs import queue as runner
from service.server import serve
from service.settings import settings_from
from tests.service.builders.app import known_host
from tests.service.builders.jobs import WORKER

if __name__ == "__main__":
    home, *given = sys.argv[1:]
    told = {"port": 0, **dict(each.split("=") for each in given)}
    worker = runner.WORKER if told.pop("compiles", None) else WORKER
    serve(settings_from(os.environ, home=home, **told), worker, known_host)
