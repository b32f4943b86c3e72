"""A model in stages. Each stage computes a range of its layers over a pool of its own, several steps at a time, and
restores these layers by itself.

Importing it loads ggml, as importing `executor` does.
"""

from kvstore_engine.stages.pipeline import Pipeline, micro_batches, open_pipeline, stage_layers
from kvstore_engine.stages.prompts import RestoredPrompt, StagedPrompts, open_staged_prompts
from kvstore_engine.stages.restorer import Restored, StagedRestorer
from kvstore_engine.stages.stores import StageStore, StageStored, stage_fingerprints, store_prefix

__all__ = [
    "Pipeline",
    "Restored",
    "RestoredPrompt",
    "StageStore",
    "StageStored",
    "StagedPrompts",
    "StagedRestorer",
    "micro_batches",
    "open_pipeline",
    "open_staged_prompts",
    "stage_fingerprints",
    "stage_layers",
    "store_prefix",
]
