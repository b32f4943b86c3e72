"""Calls of an operator to a live daemon: views, removal of blocks, and its lifetime."""
