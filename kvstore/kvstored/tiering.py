"""The positions of this daemon's tiers in the residency index, fastest first."""

HOST, NVME = 0, 1
TIER_NAMES = ("host", "nvme")
