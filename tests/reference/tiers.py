"""Positions and names of the two tiers that most tests have."""

from __future__ import annotations

HOST, NVME = 0, 1
TIER_NAMES = ("host", "nvme")
