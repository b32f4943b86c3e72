"""The thread that stores: a put begins once there is something to copy."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra `transformers`: pip install '.[transformers]'")
pytest.importorskip("transformers", reason="needs the extra `transformers`: pip install '.[transformers]'")

# isort: split
import torch

from kvstore_client.receipt import STORED
from kvstore_connectors.transformers.host_copies import HostTensorCopies
from kvstore_connectors.transformers.layers import StackBlocks
from kvstore_connectors.transformers.storer import ComputedBlocks, SequenceToStore, SessionStorer
from kvstore_proto.fingerprint import LayerGroup

BLOCK = 4


class Model:
    """A moment of its work, which it reaches when it is told. `events`: what happened, in its order."""

    def __init__(self, events: list[str], error: Exception | None = None) -> None:
        self.events, self.error = events, error
        self.is_waited_for, self.may_end = threading.Event(), threading.Event()

    def seconds_since(self, earlier: Any) -> float | None:
        return None

    def wait(self) -> None:
        self.is_waited_for.set()
        assert self.may_end.wait(20)
        if self.error is not None:
            raise self.error
        self.events.append("computed")


def _sequence(events: list[str]) -> SequenceToStore:
    def put(*_: Any, **named: Any) -> Any:
        events.append("put")
        return SimpleNamespace(statuses=[STORED] * len(named["payloads"]), reason="")

    fingerprint = SimpleNamespace(payload_bytes=lambda group: 128, groups=[LayerGroup(0)])
    session: Any = SimpleNamespace(block_tokens=BLOCK, fingerprint=fingerprint, put=put)
    return SequenceToStore(session)


def _store(model: Model) -> SequenceToStore:
    storer, sequence = SessionStorer(first_token_s=0.0), _sequence(model.events)
    source = StackBlocks(HostTensorCopies(), torch.zeros(1, 2, 1, 2 * BLOCK, 4), BLOCK, model)
    computed = ComputedBlocks(np.arange(2 * BLOCK, dtype=np.int32), source, 2, model)
    storer.advance(sequence, computed)
    assert model.is_waited_for.wait(20)
    model.may_end.set()
    assert storer.flush(20)
    return sequence


def test_the_deadline_of_a_put_does_not_run_while_the_model_computes() -> None:
    model = Model([])
    assert _store(model).done_blocks == 2
    assert model.events == ["computed", "put"]


def test_what_a_device_that_failed_should_have_computed_is_not_stored() -> None:
    model = Model([], RuntimeError("illegal address"))
    assert "illegal address" in _store(model).reason
    assert model.events == []
