"""The sections of the plan, one module for each part of a compile."""
