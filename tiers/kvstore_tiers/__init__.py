"""Where bytes live: tiers know slots and bytes, never what is worth keeping.

`base` is the contract, `testing` the suite that proves it kept; `host` is DRAM, `nvme` slab files, `memory` the plain
reference, `wrap` tiers around tiers.
"""
