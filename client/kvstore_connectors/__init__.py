"""Connectors for engines that are not ours. Each module imports its engine; none is imported by the client itself."""
