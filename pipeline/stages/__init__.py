"""The stages of a compile, one module each.

A stage's functions run in a child process and write their files under `out`. They do not use the
store or other stages.
"""
