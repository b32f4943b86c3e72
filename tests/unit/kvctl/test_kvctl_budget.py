"""kvctl reports the endurance budget and blocks that are not on NVMe."""

from __future__ import annotations

from kvctl.explain import _VOLATILE, render_chain
from kvctl.show import budget_line
from kvstore_proto.v1 import admin_pb2 as wire
from kvstored.store.transfer.gate import Refusal


def test_without_nvme_nothing_is_said() -> None:
    assert budget_line(wire.StatusReply()) == ""


def test_without_a_limit_what_was_written_is_said() -> None:
    reply = wire.StatusReply(endurance=wire.EnduranceStatus(spent_bytes=3 << 20))
    assert budget_line(reply) == "no limit, 3.0 MiB charged since the start"


def test_what_is_left_and_what_was_refused() -> None:
    reply = wire.StatusReply(
        endurance=wire.EnduranceStatus(bytes_per_day=4 << 30, left_bytes=1 << 30, scarce=True),
        counters={"admission_refused_blocks": 5, "budget_refused_blocks": 1200, "shed_blocks": 0},
    )
    assert budget_line(reply) == (
        "1.0 GiB of 4.0 GiB a day left (25 %), scarce; blocks refused: 5 by admission, 1,200 for the budget"
    )


def test_every_refusal_has_its_sentence() -> None:
    assert {refusal.value for refusal in Refusal} <= set(_VOLATILE)


def test_a_volatile_block_says_why() -> None:
    block = wire.BlockExplanation(
        key="0" * 32, state="stored", block=wire.BlockStatus(tiers=["host"]), volatile_because="budget"
    )
    assert "endurance budget was spent" in render_chain("chain", [block], 1, 0, [])
