"""kvctl blocks against the real daemon: which blocks, in which order, and how much of them there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvctl.output import FAILED
from tests.reference.conversations import model, put_conversation, tokens_of
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import running_daemon

LLAMA = replace(model(), model_name="llama-8b")
QWEN = replace(model(), model_name="qwen-2b", weights_digest="02" * 32)
BLOCK_BYTES = LLAMA.payload_bytes()


@pytest.fixture
def kvctl(capfdbinary: Any) -> Iterator[Kvctl]:
    """Six blocks of llama in two chains, that are in both tiers; two of qwen, in DRAM alone."""
    with running_daemon() as daemon:
        for fingerprint, conversation, blocks, durability in (
            (LLAMA, 1, 4, "always"), (LLAMA, 2, 2, "always"), (QWEN, 3, 2, "none"),
        ):  # fmt: skip
            with daemon.connect(fingerprint) as session:
                receipt = put_conversation(session, conversation, blocks, durability=durability, wait="settled")
                assert receipt.stored_blocks == blocks
        with daemon.connect(LLAMA) as session:
            for _ in range(5):
                session.touch(tokens_of(2, 2))
        yield Kvctl(daemon, capfdbinary)


def test_the_listing_names_models_and_sorts_and_filters(kvctl: Kvctl) -> None:
    listed = kvctl("blocks --model qwen").out
    assert listed.count("qwen-2b:") == 2 and "llama" not in listed
    digest = LLAMA.digest().hex()
    assert len(kvctl.json(["blocks", "--model", digest[:8]])["blocks"]) == 6
    used = kvctl.json("blocks --sort uses --limit 2")["blocks"]
    assert [block["accesses"] for block in used] == sorted((b["accesses"] for b in used), reverse=True)
    assert {block["fingerprint"] for block in used} == {f"llama-8b:{digest[:12]}"} and used[0]["accesses"] > 5
    depths = [block["depth"] for block in kvctl.json("blocks --sort depth --model llama")["blocks"]]
    assert depths == [3, 2, 1, 1, 0, 0]
    every = kvctl.json("blocks")["blocks"]
    for kind in ("hot", "warm", "cold"):
        assert len(kvctl.json(["blocks", "--class", kind])["blocks"]) == sum(b["residency"] == kind for b in every)


def test_totals_by_model_prefix_and_tenant(kvctl: Kvctl) -> None:
    by_model = kvctl.json("blocks --by model")
    assert [(total["fingerprint"].split(":")[0], int(total["blocks"])) for total in by_model["totals"]] == [
        ("llama-8b", 6), ("qwen-2b", 2),
    ]  # fmt: skip
    assert int(by_model["totals"][0]["payload_bytes"]) == 6 * BLOCK_BYTES
    assert int(by_model["totals"][1]["tier_bytes"]["nvme"]) == 0 < int(by_model["totals"][0]["tier_bytes"]["nvme"])
    prefixes = kvctl.json("blocks --by prefix --model llama")["totals"]
    assert [(int(total["blocks"]), total["longest_blocks"]) for total in prefixes] == [(4, 4), (2, 2)]
    listed = kvctl(["blocks", "--prefix", prefixes[0]["key"]]).out
    assert "llama-8b" in listed and " 0  " in listed, "the key is that of the chain's first block"
    table = kvctl("blocks --by tenant").out
    assert "100 %" in table and "8 blocks" in table


def test_an_unknown_model_is_said_with_those_that_there_are(kvctl: Kvctl) -> None:
    assert "no model 'gpt' has stored blocks; stored: llama-8b:" in kvctl("blocks --model gpt", exit_code=FAILED).err
