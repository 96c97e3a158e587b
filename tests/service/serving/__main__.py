"""`python -m tests.service.serving HOME [SETTING=VALUE...]`: `crucible serve` on any free port, with doubles for the job worker and the host."""

import os
import sys

from service.server import serve
from service.settings import settings_from
from tests.service.fixtures_app import known_host
from tests.service.fixtures_jobs import WORKER

if __name__ == "__main__":
    home, *given = sys.argv[1:]
    serve(settings_from(os.environ, home=home, **{"port": 0, **dict(each.split("=") for each in given)}), WORKER, known_host)
