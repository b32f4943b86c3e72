"""`kvengine info`: what a model file holds and whether this engine runs it.

Owns the selection and the layout of what is shown. It never loads weights.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from kvstore_engine.errors import UsageError
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model import ModelConfig, UnsupportedModel
from kvstore_engine.models import locate
from kvstore_engine.tokenizer import Tokenizer

_F16_BYTES = 2


def run(options: argparse.Namespace) -> int:
    """Describe the model; 0 also where it is sound but unsupported, which is then said."""
    path = locate(options.model)
    with GGUFFile.open(path) as file:
        description = describe(path, file)
    if options.json:
        print(json.dumps(description))
    else:
        width = max(map(len, description))
        for key, value in description.items():
            sys.stdout.write(f"{key.replace('_', ' '):{width}}  {value}\n")
    return 0


def describe(path: Path, file: GGUFFile) -> dict[str, object]:
    """The facts about `file`, in the order in which they are shown."""
    types = Counter(info.type_name for info in file.tensors.values())
    size = path.stat().st_size
    facts: dict[str, object] = {
        "path": str(path),
        "name": str(file.metadata.get("general.name", path.stem)),
        "architecture": str(file.metadata.get("general.architecture", "unknown")),
        "size_bytes": size,
        "tensors": ", ".join(f"{count} {name}" for name, count in types.most_common()),
    }
    problems = []
    try:
        config = ModelConfig.from_gguf(file)
        facts["layers"] = config.layers
        facts["width"] = config.width
        facts["heads"] = f"{config.heads} query, {config.kv_heads} K/V, of {config.head_dim}"
        facts["context_tokens"] = config.context_length
        facts["kv_bytes_per_token_f16"] = 2 * config.layers * config.kv_width * _F16_BYTES
    except UnsupportedModel as error:
        problems.append(str(error))
    try:
        tokenizer = Tokenizer.from_metadata(file.metadata)
        vocabulary = tokenizer.vocabulary
        facts["tokenizer"] = f"{vocabulary.model} {vocabulary.pre}".strip()
        facts["vocabulary_tokens"] = len(vocabulary.tokens)
        facts["ends_with"] = " ".join(vocabulary.tokens[token_id] for token_id in sorted(tokenizer.end_ids))
    except UsageError as error:
        problems.append(str(error))
    facts["chat_template"] = "yes" if file.metadata.get("tokenizer.chat_template") else "no"
    facts["weights_digest"] = file.weights_digest()
    facts["runs"] = "no: " + "; ".join(problems) if problems else "yes"
    return facts
