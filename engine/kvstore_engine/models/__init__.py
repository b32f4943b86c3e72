"""Model files: known models, their cache, and conversion between quantisations."""

from kvstore_engine.models.convert import QUANTISATIONS, convert
from kvstore_engine.models.fetch import fetch
from kvstore_engine.models.known import KNOWN_MODELS, KnownModel
from kvstore_engine.models.locate import ModelReference, locate, parse_reference

__all__ = [
    "KNOWN_MODELS",
    "QUANTISATIONS",
    "KnownModel",
    "ModelReference",
    "convert",
    "fetch",
    "locate",
    "parse_reference",
]
