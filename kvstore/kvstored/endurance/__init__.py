"""Endurance: how much may be written to the NVMe drive, so that one-time blocks do not wear it out."""

from kvstored.endurance.account import EnduranceAccount, EnduranceReport
from kvstored.endurance.budget import BurstBudget, SavedBudget, Verdict

__all__ = ["BurstBudget", "EnduranceAccount", "EnduranceReport", "SavedBudget", "Verdict"]
