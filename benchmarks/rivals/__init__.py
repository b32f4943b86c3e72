"""kvstored beside other stores, the same work in turns. Start with `python benchmarks/rivals/run.py --help`."""
