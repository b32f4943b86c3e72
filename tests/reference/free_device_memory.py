"""Free memory of CUDA device 0, once it has settled: the test before may have ended with processes whose memory the
driver takes back a little later. Owns nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
_PROGRAM = """
import sys
from kvstore_cuda.device import CudaDevice
from support.gpu_memory import settled_bytes
print(settled_bytes(CudaDevice(0).use_in_this_thread(), int(sys.argv[1]) if sys.argv[1:] else None))
"""


def free_bytes(expected: int | None = None, variables: Mapping[str, str] | None = None) -> int:
    """Return the device's free bytes by the driver's account, in a process of its own, which `variables` are added to:
    as soon as they are at least `expected`, else once they have settled."""
    paths = [str(_BENCHMARKS), *filter(None, sys.path)]
    environment = os.environ | dict(variables or {}) | {"PYTHONPATH": os.pathsep.join(paths)}
    arguments = [] if expected is None else [str(expected)]
    return int(subprocess.check_output([sys.executable, "-c", _PROGRAM, *arguments], env=environment))
