"""kvstored beside redis on a Unix socket, in one run: `rivals/README.md` says what is compared.

python benchmarks/vs_redis.py [--json] [--quick]
"""

import sys

from rivals.run import main

if __name__ == "__main__":
    sys.exit(main(("redis",)))
