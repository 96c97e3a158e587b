"""The database, the folders and the API keys below the service's home."""
