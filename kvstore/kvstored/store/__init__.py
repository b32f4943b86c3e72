"""The storage half of the daemon: the blocks, their places, their movement and their eviction. No sockets."""
