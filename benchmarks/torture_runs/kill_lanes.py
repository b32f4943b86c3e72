"""The kills, as many daemons at a time as there are cores: see `kills`.

Owns how many. Each lane has its own directories, daemon, clients and seed.
"""

from __future__ import annotations

import os

from torture_runs.figures import Assignment, Figures
from torture_runs.lanes import in_lanes

MOST_LANES = 4


def torture(assignment: Assignment, figures: Figures) -> None:
    """Figures: those of `kills`."""
    lanes = min(MOST_LANES, len(os.sched_getaffinity(0)))
    figures.at_least("most_lanes", lanes)
    in_lanes("kills", lanes, assignment, figures)
