"""The scrubber: reads what lies on NVMe before anybody asks for it, so that silent damage is found while it is young.

`worker` is a process of its own (the GIL), lowest in priority, that only reads; `scrubber` is its other end in the
daemon, which believes nothing it is told and verifies each suspect through its own read path.
"""
