"""Exit statuses of the `kvstored` command: docs/kvstored.md lists them."""

from __future__ import annotations

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_DAMAGE, EXIT_HANGS = 0, 1, 2, 3, 4
