"""Machines for `kvstored simulate --mode timing`: one TOML file each. `kvstore_simulator.machine` reads them."""
