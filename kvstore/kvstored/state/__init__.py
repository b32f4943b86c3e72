"""The package keeps the daemon's small state over a restart, in one LMDB environment that a separate process has open.

`databases` lists the databases. `environment` reads and writes the file. `worker` is the process that has the file
open, and `process` is the daemon's side of it. `saver` decides which values are saved, and when. `tables` forms the
values of `learned`; `store/blocks/usage` forms the values for uses of blocks. The daemon itself never loads LMDB:
damage that ends the worker process ends nothing else.
"""
