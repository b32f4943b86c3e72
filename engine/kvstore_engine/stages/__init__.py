"""A model in stages: each computes a range of its layers over a pool of its own, several steps at a time.

Imports load ggml, like those of `executor`.
"""

from kvstore_engine.stages.micro_batches import micro_batches
from kvstore_engine.stages.pipeline import Pipeline, open_pipeline, stage_layers

__all__ = ["Pipeline", "micro_batches", "open_pipeline", "stage_layers"]
