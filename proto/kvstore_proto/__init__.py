"""Contracts between processes, byte for byte: the wire, block identity, fingerprints, the shared-memory layout.

The lowest package: it imports none of the project's others, and all of them may import it.
"""
