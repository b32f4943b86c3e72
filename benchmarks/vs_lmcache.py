"""kvstored beside LMCache's standalone server, in one run: `rivals/README.md` says what is compared.

python benchmarks/vs_lmcache.py [--json] [--quick]
"""

import sys

from rivals.run import main

if __name__ == "__main__":
    sys.exit(main(("lmcache",)))
