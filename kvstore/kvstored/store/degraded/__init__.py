"""Degraded modes: the parts that are shed when a medium or the machine fails, the messages, and the return to
normal.
"""
