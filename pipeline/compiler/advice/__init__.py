"""Advice on an engine: rules propose changes, and every change is built and measured."""
