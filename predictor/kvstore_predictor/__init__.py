"""What will be needed, and when: requests and hints in, ranked guesses out.

Pure: no clock, no I/O, no threads. `base` is the contract. The daemon, its policies and the simulator use the same
objects.
"""
