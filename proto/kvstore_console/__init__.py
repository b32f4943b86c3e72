"""Terminal and report output, shared by the three programs: sizes and times as text, tables, progress, charts.

This package imports the standard library alone. It measures nothing and calls no daemon.
"""
