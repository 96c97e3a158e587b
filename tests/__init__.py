"""A package, so that no other package of this name on a host can stand in its place; child
processes import from it too.
"""
