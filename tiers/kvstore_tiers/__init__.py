"""Tiers, the places of blocks' bytes: tiers know slots and bytes, never what is worth keeping.

`base` is the contract, `testing` the suite that checks it, with a reference tier and a faulty one; `host` is DRAM,
`nvme` slab files, `keyed` a store of objects by name.
"""
