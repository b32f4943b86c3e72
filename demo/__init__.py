"""The demonstration of `make demo`: one question, answered cold, from DRAM, from NVMe, after a crash, past a damaged
block.
"""
