"""A step of the decoder: its inputs, and the ggml graph that computes it."""

from kvstore_engine.graph.decoder import GraphBuilder, StepGraph
from kvstore_engine.graph.plan import chunk_plan
from kvstore_engine.graph.step import SequenceSlice, StepInputs, plan_step

__all__ = ["GraphBuilder", "SequenceSlice", "StepGraph", "StepInputs", "chunk_plan", "plan_step"]
