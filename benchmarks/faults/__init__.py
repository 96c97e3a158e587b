"""The service under load while its host fails."""
