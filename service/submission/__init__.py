"""Conversion of requests to jobs: uploads, archives, and the plan in a client's request."""
