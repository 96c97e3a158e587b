"""How stages run: child processes, the artifact store, causes of exits, past durations."""
