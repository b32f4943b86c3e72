"""The simulator runs recorded requests through the daemon's own residency, policies and movement, in virtual time."""
