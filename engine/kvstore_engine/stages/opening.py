"""Opens the sessions of a pipeline's stages, with as much staging memory as they need. Owns their lifetime."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from kvstore_engine.restore.session import KvSession
from kvstore_engine.stages.pipeline import Pipeline
from kvstore_engine.stages.prompts import StagedPrompts
from kvstore_engine.stages.stores import StageStore, stage_fingerprints
from kvstore_proto.arena import slot_bytes
from kvstore_proto.fingerprint import Fingerprint
from kvstore_restore.learned import LearnedCosts

_STAGING_BLOCKS = 4  # of a session: the daemon copies some while the stage writes the next


Connect = Callable[[Fingerprint, int], KvSession]
"""A session for a fingerprint, with so many bytes of staging memory."""


@contextlib.contextmanager
def open_staged_prompts(
    pipeline: Pipeline,
    whole: Fingerprint,
    connect: Connect,
    profiles: Sequence[Path],
    *,
    keeps_inputs: bool = True,
    check: Callable[[], bool] = lambda: True,
) -> Iterator[StagedPrompts]:
    """What restores and stores the prompts of `pipeline`, whose model in one piece has the fingerprint `whole`.

    `profiles`: the file of each stage's costs. `check`: as of `StagedPrompts`. A stage has two sessions, the first
    stage one. Each may fill a few blocks of its own size at a time: the daemon has memory for all of them where it had
    enough for one engine.
    """
    layers = [stage.layers for stage in pipeline.stages]
    with ExitStack() as stack:

        def opened(fingerprint: Fingerprint) -> KvSession:
            session = connect(fingerprint, _STAGING_BLOCKS * slot_bytes(fingerprint.payload_bytes()))
            stack.callback(session.close)
            return session

        stores = [
            StageStore(opened(kv), None if inputs is None else opened(inputs))
            for kv, inputs in stage_fingerprints(whole, layers, pipeline.model.config.width)
        ]
        costs = [LearnedCosts.load(path) for path in profiles]
        for each, path in zip(costs, profiles, strict=True):
            stack.callback(each.save, path)
        yield stack.enter_context(StagedPrompts(pipeline, stores, costs, keeps_inputs=keeps_inputs, check=check))
