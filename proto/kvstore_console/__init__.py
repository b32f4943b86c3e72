"""What the three programs show on a terminal and in a report: one form for sizes and times, tables, progress, charts.

Below all other packages: the standard library alone, nothing of the project. Never measures, never calls a daemon.
"""
