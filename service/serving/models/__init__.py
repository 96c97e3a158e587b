"""The deployed models of one server: which there are, and how one version replaces another."""
