"""How close does the NVMe tier come to the disk? 1 MiB blocks, checksums and headers included, against fio.

Baseline: the best O_DIRECT figure that fio reaches in the same directory with psync, libaio or io_uring at 1, 4 or 8
transfers in flight. Ours: whole slots moved between host arenas and slab files (`move_in`, `move_out`), every block
checked on read. Rounds are interleaved and medians compared, since a shared disk changes from minute to minute; each
side rewrites space it wrote before.

    python benchmarks/nvme_vs_fio.py [--dir DIR] [--size-mib 256] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from kvstore_proto.arena import HEADER_BYTES
from kvstore_tiers.base import Slot
from kvstore_tiers.host import HostTier
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.segments import segment_of
from kvstore_tiers.testing import block, finish_all

MIB = 1 << 20
SLOT_BYTES = MIB + HEADER_BYTES
ENGINES = [(engine, depth) for engine in ("psync", "libaio", "io_uring") for depth in (1, 4, 8)]
Setting = tuple[str, int]


def fio(fio_path: str, directory: Path, verb: str, setting: Setting, size_mib: int) -> float:
    """Bytes a second of one fio run; 0 where this kernel lacks the engine."""
    engine, depth = setting
    jobs = depth if engine == "psync" else 1  # psync has one transfer in flight a thread
    command = [
        fio_path, "--name=baseline", f"--filename={directory / 'fio.bin'}", f"--rw={verb}", "--bs=1m", "--direct=1",
        f"--size={size_mib // jobs}m", f"--offset_increment={size_mib // jobs}m", f"--ioengine={engine}",
        f"--iodepth={1 if engine == 'psync' else depth}", f"--numjobs={jobs}", "--thread", "--group_reporting",
        "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return 0.0
    return float(json.loads(done.stdout)["jobs"][0][verb]["bw_bytes"])


class TierUnderTest:
    """Blocks in host arenas and slots for them in slab files; one call writes or reads them all."""

    def __init__(self, directory: Path, blocks: int) -> None:
        self.host = HostTier(blocks * (SLOT_BYTES + 65536) + 128 * MIB)
        self.nvme = NvmeTier.open(directory / "tier", blocks * (SLOT_BYTES + 65536) + 64 * MIB)
        header, payload = block(1, MIB)
        self.key = header.key
        self.images = self._slots(self.host, blocks)
        finish_all([partial(self.host.write, slot, header, [segment_of(payload)]) for slot in self.images])
        self.places = self._slots(self.nvme, blocks)

    def write(self) -> float:
        """Bytes a second of writing every block to its slab, slots reused."""
        for place in self.places:
            self.nvme.free(place)
        self.places = self._slots(self.nvme, len(self.images))
        return self._timed(self.nvme.move_in)

    def read(self) -> float:
        """Bytes a second of reading and verifying every block."""
        return self._timed(self.nvme.move_out)

    def close(self) -> None:
        self.nvme.close()
        self.host.close()

    def _timed(self, move: object) -> float:
        segments = [self.host.slot_segment(slot) for slot in self.images]
        starts = [partial(move, place, memory, self.key) for place, memory in zip(self.places, segments, strict=True)]  # type: ignore[operator]
        started = time.perf_counter()
        outcomes = finish_all(starts)
        elapsed_s = time.perf_counter() - started
        failed = [outcome for outcome in outcomes if not outcome.ok]
        if failed:
            raise SystemExit(f"a transfer failed: {failed[0].message}")
        return len(starts) * MIB / elapsed_s

    @staticmethod
    def _slots(tier: HostTier | NvmeTier, blocks: int) -> list[Slot]:
        slots = [tier.allocate(SLOT_BYTES) for _ in range(blocks)]
        return [slot for slot in slots if slot is not None]


def measure(fio_path: str, directory: Path, size_mib: int, rounds: int) -> list[dict[str, object]]:
    """One result for reads and one for writes."""
    tier = TierUnderTest(directory, size_mib)
    results: list[dict[str, object]] = []
    try:
        tier.write()
        fio(fio_path, directory, "write", ("psync", 1), size_mib)
        for verb, ours in (("write", tier.write), ("read", tier.read)):
            scouted = {setting: fio(fio_path, directory, verb, setting, size_mib) for setting in ENGINES}
            finalists = sorted(scouted, key=lambda setting: scouted[setting], reverse=True)[:2]
            runs: dict[Setting, list[float]] = {setting: [] for setting in finalists}
            own_runs: list[float] = []
            for _ in range(rounds):
                own_runs.append(ours())
                for setting in finalists:
                    runs[setting].append(fio(fio_path, directory, verb, setting, size_mib))
            best = max(finalists, key=lambda setting: statistics.median(runs[setting]))
            value, baseline = statistics.median(own_runs), statistics.median(runs[best])
            results.append(
                {
                    "name": f"nvme_{verb}_1mib",
                    "value": round(value / 1e6, 1),
                    "unit": "MB/s",
                    "baseline": round(baseline / 1e6, 1),
                    "baseline_name": f"fio {best[0]} x{best[1]}",
                    "ratio": round(value / baseline, 3),
                }
            )
    finally:
        tier.close()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk to test")
    parser.add_argument("--size-mib", type=int, default=256, help="bytes moved in a round, in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    arguments = parser.parse_args()
    fio_path = shutil.which("fio")
    if fio_path is None:
        print("fio is the baseline and is not installed: apt-get install fio", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="nvme-vs-fio-", dir=arguments.dir) as directory:
        results = measure(fio_path, Path(directory), arguments.size_mib, arguments.rounds)
    if arguments.json:
        print(json.dumps(results))
    else:
        for result in results:
            print("{name}: {value} {unit}, {baseline_name}: {baseline}, ratio {ratio}".format(**result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
