"""The engine's CUDA kernels: paged attention, rotation with the write into the cache, and moves of blocks.

`Device` compiles and launches them. A step calls `PagedAttention` and `RopeCache`; `BlockMover` copies, gathers and
scatters blocks of the pool between steps and beside them (`torch_executor/planes.py`). They have not yet run on
hardware: docs/engine.md has the state.
"""
