"""HTTP connections in processes of their own: they parse requests and move bodies."""
