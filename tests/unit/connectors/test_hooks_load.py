"""A connector's load asks the daemon no more than it must."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Fingerprint, LayerGroup
from kvstore_connectors.load import REASON_COMPUTED, PromptToLoad, lease_by_choice
from kvstore_restore.choice import LoadChoice
from tests.reference.fake_daemon import FakeDaemon, Knobs

FINGERPRINT = Fingerprint("m", "w", groups=(LayerGroup(0, "full", 0, (0, 1), 32),))
BLOCKS = 4
TOKENS = np.arange(64 * BLOCKS, dtype=np.int32)


def knowing() -> LoadChoice:
    """A choice that saw a block computed in 0.64 s."""
    choice = LoadChoice()
    for tokens in (64, 512, 128, 1024, 256, 2048) * 3:
        choice.observe_compute(0, tokens, 0.01 * tokens)
    return choice


@pytest.mark.parametrize("choice", [None, knowing()], ids=["all that is stored", "by choice"])
@pytest.mark.parametrize(("mapped", "stored", "held"), [(0, 0, 2), (1, 2, 2), (1, BLOCKS, BLOCKS), (BLOCKS, BLOCKS, 0)])
def test_one_question_is_enough_where_no_more_is_to_be_loaded_than_is_mapped(
    choice: LoadChoice | None, mapped: int, stored: int, held: int, tmp_path: Path
) -> None:
    with FakeDaemon(tmp_path, Knobs(mapped_blocks=mapped)) as daemon, daemon.connect(FINGERPRINT) as session:
        session.put(TOKENS[: 64 * stored], payloads=[bytes(FINGERPRINT.payload_bytes())] * stored)
        prompt = PromptToLoad(TOKENS, len(TOKENS) + 1, BLOCKS, held)
        with lease_by_choice(session, prompt, choice, block_bytes=FINGERPRINT.payload_bytes()) as leased:
            assert leased.blocks <= len(leased.lease) == mapped
            leased.copied(leased.blocks)
        assert daemon.log.count("acquire") == 1


@pytest.mark.parametrize(("choice", "questions"), [(None, 2), (knowing(), 1)])
def test_blocks_that_are_not_mapped_are_asked_for_where_they_are_worth_it(
    choice: LoadChoice | None, questions: int, tmp_path: Path
) -> None:
    knobs = Knobs(mapped_blocks=1, block_load_us=10_000_000)
    with FakeDaemon(tmp_path, knobs) as daemon, daemon.connect(FINGERPRINT) as session:
        session.put(TOKENS, payloads=[bytes(FINGERPRINT.payload_bytes())] * BLOCKS)
        prompt = PromptToLoad(TOKENS, len(TOKENS) + 1, BLOCKS, 2)
        with lease_by_choice(session, prompt, choice, block_bytes=FINGERPRINT.payload_bytes()) as leased:
            assert leased.stored == BLOCKS
            assert questions == 2 or leased.reason == REASON_COMPUTED
        assert daemon.log.count("acquire") == questions
