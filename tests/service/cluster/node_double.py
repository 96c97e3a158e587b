"""A node whose jobs run the double of a worker: `python -m tests.service.cluster.node_double` with
options of `crucible node start`.
"""

import argparse
import os
from pathlib import Path

from service.cli.node import labels_from
from service.cli.node_process import run_node
from service.settings import settings_from
from tests.service.builders.app import known_host
from tests.service.builders.jobs import WORKER


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", type=Path)
    parser.add_argument("--devices")
    parser.add_argument("--labels", default="")
    options = parser.parse_args()
    # the double copies its report from the home, which the sandbox hides
    settings = settings_from(os.environ, sandbox="off")
    devices, labels = options.devices.split(","), labels_from(options.labels)
    run_node(settings, devices, labels, WORKER, known_host, options.record)


if __name__ == "__main__":
    main()
