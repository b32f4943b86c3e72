"""A tiny Llama with random weights and a real tokenizer, for tests that need a whole model.

Owns its shape and its vocabularies. Its text is nonsense, but every path from prompt to answer is the real one.
"""

from pathlib import Path
from typing import Any

import numpy as np

from tests.reference.gguf_bytes import Tensor, write_gguf

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, CONTEXT = 2, 64, 4, 2, 16, 96, 512
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "the cat sat on the mat and the hat of the rat that ran. I'll see what they've said: it isn't what he'd say! "
    "In 2024 there were 1234567 of them, 3.14159 each; def f(x):\n    return x ** 2\n\n\tfor i in range(10): pass\n"
    "naïve café déjà vu, Straße, Ελληνικά, русский текст, 日本語のテキスト, 한국어. aaaa bbbb    cccc    \n\n\n"
)
_F32 = 0


def byte_level_vocabulary(merge_count: int = 120, pre: str = "gpt-2") -> dict[str, Any]:
    """`tokenizer.*` metadata of a byte-level BPE trained on a small corpus, with three control tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merge_count, initial_alphabet=sorted(alphabet), show_progress=False
    )
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


def write_tiny_llama(path: Path, tokenizer: dict[str, Any] | None = None, **overrides: object) -> Path:
    """Write a whole model to `path`; `overrides` replace metadata keys, dots written as two underscores."""
    tokenizer = tokenizer or byte_level_vocabulary()
    rows = len(tokenizer["tokenizer.ggml.tokens"])
    metadata = {**_shape_metadata(), **tokenizer}
    metadata.update({key.replace("__", "."): value for key, value in overrides.items()})
    random = np.random.default_rng(7)
    tensors = {"token_embd.weight": _matrix(random, WIDTH, rows), "output_norm.weight": _ones(WIDTH)}
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        for name, (columns, height) in _matrices().items():
            tensors[f"{prefix}{name}.weight"] = _matrix(random, columns, height)
        tensors[f"{prefix}attn_norm.weight"] = _ones(WIDTH)
        tensors[f"{prefix}ffn_norm.weight"] = _ones(WIDTH)
    return write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors)


def _shape_metadata() -> dict[str, object]:
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "general.file_type": 0,
        "llama.block_count": LAYERS,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.rope.freq_base": 10000.0,
    }


def _matrices() -> dict[str, tuple[int, int]]:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        "attn_q": (WIDTH, queries),
        "attn_k": (WIDTH, keys),
        "attn_v": (WIDTH, keys),
        "attn_output": (queries, WIDTH),
        "ffn_gate": (WIDTH, FEED_FORWARD),
        "ffn_up": (WIDTH, FEED_FORWARD),
        "ffn_down": (FEED_FORWARD, WIDTH),
    }


def _matrix(random: np.random.Generator, columns: int, rows: int) -> Tensor:
    values = random.standard_normal((rows, columns)).astype(np.float32) * np.float32(1.5 / np.sqrt(columns))
    return _F32, (columns, rows), values.tobytes()


def _ones(size: int) -> Tensor:
    return _F32, (size,), np.ones(size, np.float32).tobytes()


def _merges(tokenizer_json: str) -> list[str]:
    import json

    merges = json.loads(tokenizer_json)["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
