"""A tiny Llama with random weights and a trained tokenizer, for tests that need a whole model.

Owns its vocabularies; `make_gguf` makes the weights. Its text is nonsense, but every path from prompt to answer is the
real one.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference.make_gguf import TinyModel, write_model

CONTEXT = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "the cat sat on the mat and the hat of the rat that ran. I'll see what they've said: it isn't what he'd say! "
    "In 2024 there were 1234567 of them, 3.14159 each; def f(x):\n    return x ** 2\n\n\tfor i in range(10): pass\n"
    "naïve café déjà vu, Straße, Ελληνικά, русский текст, 日本語のテキスト, 한국어. aaaa bbbb    cccc    \n\n\n"
)
_SHAPE = TinyModel(layers=2, width=64, heads=4, kv_heads=2, head_dim=16, feed_forward=96, quantisation="f32")
# What `make_gguf` invents and our vocabularies replace or must not have.
_MADE_UP_KEYS = (
    "tokenizer.ggml.pre",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.chat_template",
)


def byte_level_vocabulary(merge_count: int = 120, pre: str = "gpt-2") -> dict[str, Any]:
    """`tokenizer.*` metadata of a byte-level BPE trained on a small corpus, with three control tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + merge_count, initial_alphabet=sorted(alphabet), show_progress=False)
    trained.train_from_iterator([_CORPUS], trainer)
    vocabulary = trained.get_vocab()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = control + sorted(vocabulary, key=lambda text: vocabulary[text])
    merges = _merges(trained.to_str())
    kinds = np.array([3] * len(control) + [1] * len(vocabulary), np.int32)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def sentencepiece_vocabulary(piece_count: int = 300) -> dict[str, Any]:
    """`tokenizer.*` metadata of a SentencePiece-style vocabulary: scores instead of merges, byte tokens."""
    from tokenizers import Tokenizer, models, trainers

    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=piece_count, show_progress=False)
    trained.train_from_iterator([line.replace(" ", "▁") for line in _CORPUS.splitlines()] * 2, trainer)
    learned = trained.get_vocab()
    pieces = sorted(learned, key=lambda text: learned[text])
    # As SentencePiece orders them: joined pieces by merit first, single characters last.
    pieces = [text for text in pieces if len(text) > 1] + [text for text in pieces if len(text) == 1]
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    scores = [0.0] * (len(special) + 256) + [-float(rank) for rank in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": special + byte_tokens + pieces,
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces), np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write_tiny_llama(
    path: Path,
    tokenizer: Mapping[str, object] | None = None,
    *,
    layers: int = _SHAPE.layers,
    head_dim: int = _SHAPE.head_dim,
    attention_gains: tuple[float, ...] = (),
    **overrides: object,
) -> Path:
    """Write a whole model to `path`; `overrides` replace metadata keys, dots written as two underscores."""
    tokenizer = tokenizer or byte_level_vocabulary()
    tokens = tokenizer["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    metadata: dict[str, object] = dict.fromkeys(_MADE_UP_KEYS)
    metadata |= {"llama.context_length": CONTEXT, **tokenizer}
    metadata |= {key.replace("__", "."): value for key, value in overrides.items()}
    width = head_dim * _SHAPE.heads
    shape = replace(
        _SHAPE, layers=layers, head_dim=head_dim, width=width, vocabulary=len(tokens), metadata=metadata,
        attention_gains=attention_gains,
    )  # fmt: skip
    return write_model(path, shape)


def _merges(tokenizer_json: str) -> list[str]:
    merges = json.loads(tokenizer_json)["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
