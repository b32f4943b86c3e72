"""A step of the decoder: its inputs, and the ggml graph that computes it."""

from kvstore_engine.graph.decoder import GraphBuilder, StepGraph
from kvstore_engine.graph.step import SequenceSlice, StepInputs, plan_step

__all__ = ["GraphBuilder", "SequenceSlice", "StepGraph", "StepInputs", "plan_step"]
