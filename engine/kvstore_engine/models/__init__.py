"""The package provides model files: it lists known models, keeps the cache of files, and converts between
quantisations.
"""
