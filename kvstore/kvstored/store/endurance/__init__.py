"""Endurance: how much may be written to the NVMe drive, so that one-time blocks do not wear it out."""

from kvstored.store.endurance.account import TOO_MUCH, EnduranceAccount, EnduranceReport
from kvstored.store.endurance.budget import BurstBudget, SavedBudget, Verdict

__all__ = ["TOO_MUCH", "BurstBudget", "EnduranceAccount", "EnduranceReport", "SavedBudget", "Verdict"]
