"""The benchmark of verification takes its baseline from reads that verify nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
BOTH_SIDES = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import verify_overhead
verify_overhead.ROUND_BYTES = 1 << 20
reads = verify_overhead.Reads(Path(sys.argv[2]), 256 << 10)
assert reads.bytes_per_s() > 0
reads.header = replace(reads.header, key=b"another block's!")
with verify_overhead.unverified(reads):
    assert reads.bytes_per_s() > 0
reads.bytes_per_s()
"""


def test_only_the_baseline_takes_what_is_not_the_block(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BOTH_SIDES, str(BENCHMARKS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.startswith("a read failed: "), done.stderr
