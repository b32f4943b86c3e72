"""Objects: bundles of tensors that processes of a tenant share, with names, versions and one read-only mapping.

`ObjectStore` puts, finds, maps and removes them; `Sources` say where a new one's bytes come from. `named` has the
simpler scheme that needs no catalogue: bytes under a name, for unary calls too.
"""
