"""Model description and weights: the content of a GGUF file, checked, and ready for the graph."""

from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.metadata import UnsupportedModel
from kvstore_engine.model.placement import copied_bytes, order_of_sums
from kvstore_engine.model.rope import RopeConfig
from kvstore_engine.model.weights import LayerWeights, Linear, Model, load_model

__all__ = [
    "LayerWeights",
    "Linear",
    "Model",
    "ModelConfig",
    "RopeConfig",
    "UnsupportedModel",
    "copied_bytes",
    "load_model",
    "order_of_sums",
]
