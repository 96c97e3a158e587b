"""The graph of a model in HTML: its data, its style, and the script that draws it."""
