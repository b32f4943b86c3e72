"""Where a model file comes from: known models, the cache they live in, and conversion between
quantisations.
"""
