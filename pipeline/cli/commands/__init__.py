"""The commands of the pipeline: short scripts, which open what they need."""
