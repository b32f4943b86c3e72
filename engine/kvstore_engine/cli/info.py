"""`kvengine info`: shows the content of a model file and whether this engine runs it.

The module selects and lays out the facts. It never loads weights.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

from kvstore_console.table import render_facts
from kvstore_engine.devices import DeviceName
from kvstore_engine.errors import UsageError
from kvstore_engine.ggml import GGMLError, load_library
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.metadata import UnsupportedModel
from kvstore_engine.model.quantisation import check_quantisation
from kvstore_engine.model.tensors import check_tensors
from kvstore_engine.models.locate import locate
from kvstore_engine.tokenizer import Tokenizer

_F16_BYTES = 2


def run(options: argparse.Namespace) -> int:
    """Run `kvengine info`: print facts about the model file that `options` names, and return exit code 0. A model that
    this engine cannot run is no error: the facts say why.
    """
    device = DeviceName.parse(options.device)
    path = locate(options.model)
    with GGUFFile.open(path) as file:
        description = describe(path, file, device)
    if options.json:
        print(json.dumps(description))
    else:
        print(render_facts([(key.replace("_", " "), str(value)) for key, value in description.items()]))
    return 0


def describe(path: Path, file: GGUFFile, device: DeviceName) -> dict[str, object]:
    """Return facts about the model in `file`, which is open from `path`, by name, in the order in which they are shown.
    The last one, "runs", says whether `device` can run the model, and why not.
    """
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
        facts["family"] = config.family.models
        facts["layers"] = config.layers
        facts["width"] = config.width
        facts["heads"] = f"{config.heads} query, {config.kv_heads} K/V, of {config.head_dim}"
        facts["context_tokens"] = config.context_length
        facts["kv_bytes_per_token_f16"] = 2 * config.layers * config.kv_width * _F16_BYTES
        facts["rope"] = _rope(config)
        facts["windows"] = _windows(config)
        facts["soft_caps"] = _soft_caps(config)
        check_tensors(file, config)
        check_quantisation(file, load_library())
        if device.is_torch:
            problems += _torch_problems(file, config, device)
    except (UnsupportedModel, GGMLError) as error:
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


def _torch_problems(file: GGUFFile, config: ModelConfig, device: DeviceName) -> list[str]:
    from kvstore_engine.torch_executor import refusals

    return refusals(file, config, device)


def _rope(config: ModelConfig) -> str:
    rope = config.rope.describe()
    if config.local_rope:
        rope += f"; within windows {config.local_rope.describe()}"
    return f"{rope}; otherwise beyond {config.longest_context} tokens" if config.longest_context else rope


def _windows(config: ModelConfig) -> str:
    sizes = Counter(size for size in config.windows if size)
    return ", ".join(f"{count} of {config.layers} layers see {size} tokens" for size, count in sizes.items()) or "none"


def _soft_caps(config: ModelConfig) -> str:
    caps = {"attention": config.attention_softcap, "output": config.output_softcap}
    return ", ".join(f"{where} {cap:g}" for where, cap in caps.items() if cap) or "none"
