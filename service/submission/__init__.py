"""From a request to a job: uploads, archives, and the plan as a client sends it."""
