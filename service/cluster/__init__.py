"""Nodes of a service on a Ray cluster. Ray starts them, and only what starts needs Ray."""
