"""The daemon from start to stop: one daemon a directory, the state left by the last process, and the state left for the
next.
"""
