"""Engines that answer requests: repository, deployments, batching, one child process for each
instance.
"""
