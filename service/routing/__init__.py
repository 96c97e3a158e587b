"""HAProxy as the router before several servers: its configuration, its process, its servers."""
