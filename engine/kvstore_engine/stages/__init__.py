"""A model in stages. Each stage computes a range of its layers over a pool of its own, several steps at a time, and
restores these layers by itself.

Importing it loads ggml, as importing `executor` does.
"""
