"""The scrubber: reads blocks on NVMe before a client asks for them, to find silent damage early.

`worker` is a process of its own (the GIL), lowest in priority, that only reads; `scrubber` is its other end in the
daemon, which verifies each suspect through its own read path.
"""
