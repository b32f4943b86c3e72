"""Connectors for other engines. Each module imports its engine; the client imports none of them."""
