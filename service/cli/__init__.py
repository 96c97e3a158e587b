"""The `crucible` command."""
