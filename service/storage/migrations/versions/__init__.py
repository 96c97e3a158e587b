"""The revisions of the database, oldest first. A published revision is never changed."""
