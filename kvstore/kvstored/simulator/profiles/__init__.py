"""Machines for `kvstored simulate --mode timing`: one TOML file each. `kvstored.simulator.machine` reads them."""
