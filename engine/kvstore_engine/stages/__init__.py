"""A model in stages: each computes a range of its layers over a pool of its own, several steps at a time, and restores
those layers by itself.

Imports load ggml, like those of `executor`.
"""
