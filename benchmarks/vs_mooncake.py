"""kvstored beside Mooncake Store over loopback TCP, in one run: `rivals/README.md` says what is compared.

python benchmarks/vs_mooncake.py [--json] [--quick]
"""

import sys

from rivals.run import main

if __name__ == "__main__":
    sys.exit(main(("mooncake",)))
