"""Values of an object store: runs of values, and the log of changes that says where each value is."""
