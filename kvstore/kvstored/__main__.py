"""`python -m kvstored` is the `kvstored` command."""

import sys

from kvstored.cli import main

sys.exit(main())
