"""The daemon from start to stop: one daemon a directory, what the last one left, what the next one gets."""
