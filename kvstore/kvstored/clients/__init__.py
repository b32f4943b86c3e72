"""How bytes and rights reach a client: handshake and descriptors, staging memory, leases, limbo."""
