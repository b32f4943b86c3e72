"""Tiers around tiers: each takes a tier and is one, and changes how transfers end or when."""
