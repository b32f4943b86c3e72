"""Model description and weights: what a GGUF file says, checked, and ready for the graph."""

from kvstore_engine.model.config import ModelConfig, RopeConfig, UnsupportedModel
from kvstore_engine.model.weights import LayerWeights, Model, load_model

__all__ = ["LayerWeights", "Model", "ModelConfig", "RopeConfig", "UnsupportedModel", "load_model"]
