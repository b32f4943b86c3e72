"""A model that looks at images, of LLaVA's shape, with random weights: a folder as vLLM and Transformers read it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

IMAGE_TOKEN, VOCABULARY = 5, 300
IMAGE_SIZE, PATCH = 32, 8
PATCHES = (IMAGE_SIZE // PATCH) ** 2


def configuration(scale: int = 1) -> Any:
    """Return the configuration; `scale` multiplies the layers and the size of the vision tower."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    vision = CLIPVisionConfig(
        hidden_size=32 * scale, intermediate_size=64 * scale, num_hidden_layers=2 * scale,
        num_attention_heads=2 * scale, image_size=IMAGE_SIZE * scale, patch_size=PATCH, projection_dim=32 * scale,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, image_token_id=IMAGE_TOKEN,
        vision_feature_layer=-2, vision_feature_select_strategy="default",
        image_seq_length=PATCHES * scale * scale,
    )  # fmt: skip


def random_model(seed: int, scale: int = 1) -> Any:
    import torch
    from transformers import LlavaForConditionalGeneration

    torch.manual_seed(seed)
    return LlavaForConditionalGeneration(configuration(scale)).eval()


def export(folder: Path, seed: int = 0, scale: int = 1) -> Path:
    """Write the model, its tokenizer and its processor to `folder`, and return it."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = random_model(seed, scale)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tensors = {_checkpoint_name(name): tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "<image>": IMAGE_TOKEN}
    words |= {f"w{number}": number for number in range(VOCABULARY) if number not in words.values()}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=["<image>"],
    ).save_pretrained(folder)  # fmt: skip
    size = IMAGE_SIZE * scale
    images = {
        "image_processor_type": "CLIPImageProcessor", "crop_size": {"height": size, "width": size},
        "do_center_crop": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
        "size": {"shortest_edge": size}, "resample": 3,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    processor = {
        "processor_class": "LlavaProcessor", "image_token": "<image>", "patch_size": PATCH,
        "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
    }  # fmt: skip
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def _checkpoint_name(name: str) -> str:
    """Return a tensor's name in published checkpoints, which vLLM reads: Transformers 5 has one part less."""
    tower = "vision_tower."
    return name if f"{tower}vision_model" in name else name.replace(tower, f"{tower}vision_model.")


def draw(folder: Path, count: int, size: int) -> None:
    """Write `count` pictures of random pixels to `folder`."""
    import numpy as np
    from PIL import Image

    for seed in range(count):
        pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{seed}.png", "PNG")


if __name__ == "__main__":  # for the benchmark: LLaVA's own 576 patches an image
    SCALE = 6
    export(Path(sys.argv[1]), scale=SCALE)
    draw(Path(sys.argv[2]), int(sys.argv[3]), IMAGE_SIZE * SCALE)
