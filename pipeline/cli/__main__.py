"""`python -m pipeline.cli`: the same as `crucible`."""

from service.cli.main import main

main()
