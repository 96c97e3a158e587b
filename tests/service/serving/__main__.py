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
    home, *words = sys.argv[1:]
    options = {"port": 0, **dict(word.split("=") for word in words)}
    worker = runner.WORKER if options.pop("compiles", None) else WORKER
    if worker is WORKER:  # it copies its report from the home, which the sandbox hides
        options.setdefault("sandbox", "off")
    serve(settings_from(os.environ, home=home, **options), worker, known_host)
