"""Several servers of one database while hosts, the database and the network fail."""
