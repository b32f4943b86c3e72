"""The way of bytes and rights to a client: handshake and descriptors, staging memory, leases, limbo."""
