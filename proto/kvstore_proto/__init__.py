"""What two processes must agree on, byte for byte: the wire, block identity, fingerprints, the shared-memory layout.

The ground floor: imports nothing of ours, and is imported by everything.
"""
