"""Self-care of the daemon: periodic work, the invariant checker, and the scrubber for damage on NVMe."""
