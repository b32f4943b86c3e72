"""`python -m kvstore_engine.cli` is `kvengine`."""

import sys

from kvstore_engine.cli.main import main

sys.exit(main())
