"""A supervisor whose nodes run the double of a worker: `python -m
tests.service.cluster.supervisor_process ADDRESS [--once]`.
"""

import os
import sys

from service.cluster.operations import supervise, supervise_again
from service.cluster.scaling import Limits
from service.cluster.supervisor import SupervisorOptions
from service.settings import settings_from

MODULE = "tests.service.cluster.supervisor_process"


def main(address: str, once: bool) -> None:
    if not once:
        supervise_again([sys.executable, "-m", MODULE, address, "--once"])
    options = SupervisorOptions(
        Limits(min_nodes=0, max_nodes=2, idle_s=3600),
        {"pool": "crucible"},
        labels="ray",
        extra_labels={"ray": ""},
        command=("-m", "tests.service.cluster.node_double"),
    )
    supervise(settings_from(os.environ), address, options)


if __name__ == "__main__":
    main(sys.argv[1], "--once" in sys.argv)
