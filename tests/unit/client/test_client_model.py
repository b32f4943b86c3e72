"""Random puts and gets of a session against a plain dictionary: what is found is what was stored, byte for byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore_client
from kvstore_client import Fingerprint, LayerGroup
from tests.reference.fake_daemon import FakeDaemon

FINGERPRINT = Fingerprint("m", "w", block_tokens=2, engine_block_tokens=1, groups=(LayerGroup(0, "full", 0, (0,), 50),))
BLOCK_TOKENS, BLOCK_BYTES = 2, FINGERPRINT.payload_bytes()

# Two token values: prompts share prefixes, diverge inside blocks, and end in partial ones.
PROMPT = st.lists(st.integers(0, 1), max_size=11)
OPERATION = st.tuples(st.sampled_from(["put", "get", "lookup"]), PROMPT, st.integers(0, 4), st.integers(0, 5))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@settings(max_examples=25, deadline=None)
@given(st.lists(OPERATION, min_size=1, max_size=20))
def test_a_session_answers_as_a_dictionary_would(
    directory: Path, operations: list[tuple[str, list[int], int, int]]
) -> None:
    stored: dict[tuple[int, ...], bytes] = {}  # by whole prefix
    with (
        FakeDaemon(directory / "s", arena_bytes=4 << 20) as daemon,
        kvstore_client.connect(
            daemon.directory, fingerprint=FINGERPRINT, deadline_s=10.0, required=True, staging_bytes=3 * 8192
        ) as session,
    ):
        for serial, (name, prompt, first, count) in enumerate(operations):
            prefixes = [tuple(prompt[: end * BLOCK_TOKENS]) for end in range(1, len(prompt) // BLOCK_TOKENS + 1)]
            run = next((i for i, prefix in enumerate(prefixes) if prefix not in stored), len(prefixes))
            if name == "put":
                wanted = prefixes[first : first + count]
                payloads = [bytes([serial, i]) * (BLOCK_BYTES // 2) for i in range(len(wanted))]
                first = min(first, len(prefixes))
                receipt = session.put(prompt, first_block=first, payloads=payloads)
                expected: list[str] = []
                for prefix, payload in zip(wanted, payloads, strict=True):
                    parent = prefix[:-BLOCK_TOKENS]
                    if prefix in stored:
                        expected.append("present")
                    elif parent and parent not in stored:  # an orphan
                        expected.append("throttled")
                    else:
                        expected.append("stored")
                        stored[prefix] = payload
                assert receipt.statuses == expected
            elif name == "lookup":
                assert session.lookup(prompt).blocks == run
            else:
                with session.get(np.array(prompt, np.int64), max_blocks=count) as lease:
                    assert len(lease) == min(run, count)
                    for i in range(len(lease)):
                        assert lease.payload(i).tobytes() == stored[prefixes[i]]
