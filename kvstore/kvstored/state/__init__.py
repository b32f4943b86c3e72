"""Small state over a restart, in one LMDB environment that a process of its own has open.

`databases` lists what is kept, `environment` is the file, `worker` the process, `process` the daemon's side of it, and
`keeper` decides what is saved and when; values of what was learned are `tables`, of uses `store/blocks/usage`. The
daemon itself never loads LMDB: damage that ends that process ends nothing else.
"""
