"""Predictions of chains and of the times when they will be needed: requests and hints in, ranked guesses out.

Pure: no clock, no I/O, no threads. `base` is the contract. The daemon, its policies and the simulator use these
objects.
"""
