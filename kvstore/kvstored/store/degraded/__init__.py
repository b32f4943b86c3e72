"""Degraded modes: what is shed when a medium or the machine fails, how it is said, and how it comes back."""
