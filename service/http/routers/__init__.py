"""The HTTP paths. Each function checks the scope, makes one call, and converts the result."""
