"""The simulator: recorded requests through the daemon's own residency, policies and admissions, in virtual time."""
