"""Servers that share a database and files load the same models."""
