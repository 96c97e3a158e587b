"""`python -m tests.service.serving_models HOME [SETTING=VALUE...]`: as tests.service.serving, with the double's models deployed."""

import os
import sys

from service.server import serve
from service.settings import settings_from
from tests.service.fixtures_app import known_host
from tests.service.fixtures_jobs import WORKER
from tests.service.fixtures_serving import UNLOADED, DoubleServing

if __name__ == "__main__":
    home, *given = sys.argv[1:]
    settings = settings_from(os.environ, home=home, **{"port": 0, **dict(each.split("=") for each in given)})
    serve(settings, WORKER, known_host, DoubleServing(unloaded=UNLOADED))
