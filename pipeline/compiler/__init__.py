"""From a plan to a report: the compile itself."""
