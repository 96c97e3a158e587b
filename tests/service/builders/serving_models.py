"""`python -m tests.service.builders.serving_models HOME [SETTING=VALUE...]`: as
tests.service.serving, with the double's models deployed.

`models=NAME,...` keeps only these.
"""

import os
import sys

from service.server import serve
from service.settings import settings_from
from tests.service.builders.app import known_host
from tests.service.builders.jobs import WORKER
from tests.service.builders.serving import MODELS, UNLOADED, DoubleServing
from tests.service.language.double import DoubleGenerating

if __name__ == "__main__":
    home, *words = sys.argv[1:]
    options = {"port": 0, "sandbox": "off", **dict(word.split("=") for word in words)}
    names = str(options.pop("models", "")).split(",")
    models = {name: model for name, model in MODELS.items() if name in names or names == [""]}
    serve(
        settings_from(os.environ, home=home, **options),
        WORKER,
        known_host,
        DoubleServing(models, UNLOADED),
        DoubleGenerating(),
    )
