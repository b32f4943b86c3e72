"""The part of the daemon that gives bytes and rights to a client: handshake and descriptors, staging memory, leases,
limbo.
"""
