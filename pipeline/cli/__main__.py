"""`python -m pipeline.cli`."""

from pipeline.cli.commands import main

main()
