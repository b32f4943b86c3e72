"""Text to token ids and back, built from a GGUF file's own metadata; equal to llama.cpp's tokenizer."""

from kvstore_engine.tokenizer.tokenizer import StreamingDetokenizer, Tokenizer
from kvstore_engine.tokenizer.vocabulary import TokenizerError, Vocabulary

__all__ = ["StreamingDetokenizer", "Tokenizer", "TokenizerError", "Vocabulary"]
