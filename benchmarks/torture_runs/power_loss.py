"""Power loss: the recorder and replayer of `kvstore_tiers.testing.powerloss`, for the time it is given.

Owns the translation of its figures alone; what is modelled stands in docs/power-loss.md. It runs one campaign after
another with new seeds and reports the figures so far after each. Without a C compiler it measures nothing, and the
figures are null with that reason.
"""

from __future__ import annotations

import os
import tempfile

from kvstore_tiers.testing.powerloss import CompilerMissing
from kvstore_tiers.testing.powerloss.campaign import power_loss
from torture_runs.figures import Assignment, Clock, Figures

CAMPAIGN_S = 60.0
SHORTEST_CAMPAIGN_S = 10.0  # less may be over when the first workload is recorded
MOST_STATES = 5000
SEEDS = 1_000_000
NAMES = ("power_loss_states", "power_loss_wrong", "power_loss_lost")


def torture(assignment: Assignment, figures: Figures) -> None:
    """Figures: `power_loss_states`, `power_loss_wrong` (bytes or rules), `power_loss_lost` (of what was synced)."""
    tempfile.tempdir = str(assignment.directory)
    clock, seed = Clock(assignment), assignment.seed % SEEDS * 1000
    workers = max(1, (os.cpu_count() or 1) // 2)
    shortest_s = SHORTEST_CAMPAIGN_S
    while clock.goes_on(figures.counts["power_loss_states"]) or not figures.counts["power_loss_states"]:
        wanted = (assignment.stop_at or MOST_STATES) - figures.counts["power_loss_states"]
        try:
            found = power_loss(
                seed=seed,
                states=max(1, min(wanted, MOST_STATES)),
                seconds=min(CAMPAIGN_S, max(shortest_s, clock.left_s)),
                workers=workers,
            )
        except CompilerMissing as error:
            for name in NAMES:
                figures.leave_out(name, str(error))
            return
        figures.add("power_loss_states", found.states)
        figures.add("power_loss_lost", found.lost)
        figures.add("power_loss_wrong", found.wrong + found.broken + found.died)
        figures.add("power_loss_promises_checked", found.promised)
        figures.add("power_loss_corrupt_reads", found.corrupt_reads)
        figures.at_least("over_capacity_bytes", found.over_capacity_bytes)
        for failure in found.failures:
            figures.fail("power_loss_failures", f"seed {seed}: {failure}"[:1000])
        figures.heartbeat(now=True)
        seed += 1
        shortest_s *= 2  # on a busy machine the first may have had no time left for a single state
