"""What keeps a graph with Q/DQ pairs from running in 8 bits, and the fixes."""
