"""HTTP: connections, the guard, routes, error responses."""
