"""Jobs: their states, their store, and the child processes that run them."""
