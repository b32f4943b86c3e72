"""The storage half of the daemon: which blocks exist, where they are, how they move, what is evicted. No sockets."""
