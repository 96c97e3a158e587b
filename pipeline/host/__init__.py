"""The machine: CPU flags, GPUs, contention, and what the operating system offers."""
