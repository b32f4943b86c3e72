"""Direct storage of a worker in a test: the library that stands for kvikio, what it is ordered to do wrong, and how
often it read."""

from __future__ import annotations

import os
from pathlib import Path

LIBRARY = Path(__file__).parents[1] / "emulated_kvikio"


class EmulatedStorage:
    def __init__(self, directory: Path) -> None:
        self._orders, self._reads = directory / "orders", directory / "reads"
        self._orders.touch()
        self._reads.touch()

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables of the worker's environment."""
        return {
            "PYTHONPATH": f"{LIBRARY}:{os.environ.get('PYTHONPATH', '')}",
            "EMULATED_KVIKIO_ORDERS": str(self._orders),
            "EMULATED_KVIKIO_READS": str(self._reads),
        }

    def order(self, what: str) -> None:
        """See the library; empty: do it right."""
        scratch = self._orders.with_suffix(".new")
        scratch.write_text(what)
        os.replace(scratch, self._orders)

    @property
    def reads(self) -> int:
        return len(self._reads.read_text().splitlines())
