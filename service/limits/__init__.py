"""Limits of each key: of one server, or over all servers of a shared database."""
