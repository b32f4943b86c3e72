"""Power loss, replayed: record what a process does to its files, cut the log anywhere, see whether it recovers.

    recording = Recording(root, log)                     # root: an empty directory
    subprocess.run(command, env=recording.environment(), check=True)
    figures = replay(log, seed=1, states=5000)

`record_workload` does both for the NVMe tier. docs/power-loss.md says what is modelled and what is not.
"""

from __future__ import annotations

from kvstore_tiers.testing.powerloss.record import CompilerMissing, Marker, Recording
from kvstore_tiers.testing.powerloss.replay import Figures, ReplayFailed, replay

__all__ = ["CompilerMissing", "Figures", "Marker", "Recording", "ReplayFailed", "replay"]
