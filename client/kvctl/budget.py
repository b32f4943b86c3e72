"""What an operator reads of the endurance budget: one line, the same in status, tiers and top. Pure."""

from __future__ import annotations

from kvstore_console.units import human_bytes, human_count, human_share
from kvstore_proto.v1 import admin_pb2 as wire


def budget_line(status: wire.StatusReply) -> str:
    """Empty where there is no NVMe tier."""
    if not status.HasField("endurance"):
        return ""
    budget = status.endurance
    if not budget.bytes_per_day:
        text = f"no limit, {human_bytes(budget.spent_bytes)} charged since the start"
    else:
        share = human_share(budget.left_bytes, budget.bytes_per_day)
        text = f"{human_bytes(budget.left_bytes)} of {human_bytes(budget.bytes_per_day)} a day left ({share})"
        text += ", scarce" if budget.scarce else ""
    refused = [
        f"{human_count(status.counters[name])} {what}"
        for name, what in (
            ("admission_refused_blocks", "by admission"),
            ("budget_refused_blocks", "for the budget"),
            ("shed_blocks", "because NVMe was degraded"),
        )
        if status.counters.get(name)
    ]
    return text + (f"; blocks refused: {', '.join(refused)}" if refused else "")
