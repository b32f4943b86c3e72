"""The engine of many sequences: requests in, events out, one step at a time."""
