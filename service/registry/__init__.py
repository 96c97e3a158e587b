"""Promoted models: their versions, the current one, and the options for serving them."""
