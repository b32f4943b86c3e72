"""A step of the decoder: what is asked of it, and the ggml graph that computes it."""

from kvstore_engine.graph.decoder import StepGraph, build_graph
from kvstore_engine.graph.plan import chunk_plan
from kvstore_engine.graph.step import SequenceSlice, StepInputs, plan_step

__all__ = ["SequenceSlice", "StepGraph", "StepInputs", "build_graph", "chunk_plan", "plan_step"]
