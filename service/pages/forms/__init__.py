"""Forms of pages: their fields, and what they stand for."""
