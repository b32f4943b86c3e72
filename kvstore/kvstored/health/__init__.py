"""The daemon's care for itself: periodic work, the invariant checker, and the scrubber for damage on NVMe."""
