"""Low precision in a graph: where it goes, how it is written, what a graph brings along."""
