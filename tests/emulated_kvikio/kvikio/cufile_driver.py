"""Says whether cuFile starts."""

from __future__ import annotations

import os


def driver_open() -> None:
    if "EMULATED_KVIKIO_NO_CUFILE" in os.environ:
        raise RuntimeError("cuFile isn't available, please build with CUDA v11.4+")
