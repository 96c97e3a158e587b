"""What a language model is compiled to. A library is a module with the functions of `Library`.

registry.library_of("torch") -> module: export, build, open_served, open_graph, ...
"""
