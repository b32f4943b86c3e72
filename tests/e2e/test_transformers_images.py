"""Image features through the store, with a small LLaVA of random weights: equal to the bit, never another model's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reference.running_daemon import RunningDaemon, running_daemon
from tests.reference.tiny_llava import IMAGE_SIZE, IMAGE_TOKEN, PATCHES, random_model
from tests.reference.tiny_transformers import tiny_model

# isort: split
import torch

from kvstore_connectors.transformers import CachedImages
from kvstore_proto.errors import KVStoreError


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("limits.max_clients=64") as running:
        yield running


def picture(seed: int) -> torch.Tensor:
    return torch.randn((3, IMAGE_SIZE, IMAGE_SIZE), generator=torch.Generator().manual_seed(seed))


class Watched:
    """The answers of a model for pictures, with how many of them its vision tower saw."""

    def __init__(self, model: Any) -> None:
        self.model, self.seen = model, 0
        model.model.vision_tower.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.seen += len((*given, options.get("pixel_values"))[0])

    def answer(self, *pictures: torch.Tensor) -> torch.Tensor:
        ids = torch.tensor([[1, 9, *[IMAGE_TOKEN] * PATCHES, 10]] * len(pictures))
        asked = {"input_ids": ids, "pixel_values": torch.stack(pictures), "attention_mask": torch.ones_like(ids)}
        with torch.inference_mode():
            return self.model(**asked).logits


def test_features_are_computed_once_and_equal_to_the_bit(daemon: RunningDaemon) -> None:
    plain, watched = Watched(random_model(1)), Watched(random_model(1))
    expected = [plain.answer(picture(seed)) for seed in (1, 2)]
    with CachedImages(watched.model, daemon.socket_dir, deadline_s=30):
        assert torch.equal(watched.answer(picture(1)), expected[0]) and watched.seen == 1
        assert torch.equal(watched.answer(picture(1)), expected[0]) and watched.seen == 1
        assert torch.allclose(watched.answer(picture(2), picture(1), picture(2))[1:2], expected[0], atol=1e-5)
        assert watched.seen == 2
    restarted = Watched(random_model(1))
    with CachedImages(restarted.model, daemon.socket_dir, deadline_s=30):
        assert torch.equal(restarted.answer(picture(1)), expected[0])
        generated = restarted.model.generate(
            input_ids=torch.tensor([[1, *[IMAGE_TOKEN] * PATCHES, 10]]), pixel_values=picture(2)[None],
            max_new_tokens=3, do_sample=False,
        )  # fmt: skip
        assert generated.shape[1] > PATCHES + 2 and restarted.seen == 0
    restarted.answer(picture(1))
    assert restarted.seen == 1  # the model's own again


def test_other_pixels_weights_or_dtypes_are_computed(daemon: RunningDaemon) -> None:
    def seen(watched: Watched, image: torch.Tensor) -> int:
        before = watched.seen
        with CachedImages(watched.model, daemon.socket_dir, deadline_s=30):
            found = watched.answer(image)
        now = watched.seen
        assert torch.equal(found, watched.answer(image))
        return now - before

    watched, image = Watched(random_model(2)), picture(3)
    assert [seen(watched, image), seen(watched, image), seen(Watched(random_model(2)), image)] == [1, 0, 0]
    changed = image.clone()
    changed[1, 2, 3] += 1
    assert [seen(watched, changed), seen(Watched(random_model(3)), image)] == [1, 1]
    with torch.no_grad():
        watched.model.model.multi_modal_projector.linear_1.weight[0, 0] += 1
    assert [seen(watched, image), seen(watched, image)] == [1, 0]
    assert seen(Watched(random_model(2).to(torch.float64)), image.double()) == 1


def test_weights_that_change_while_it_is_open(daemon: RunningDaemon) -> None:
    watched = Watched(random_model(4))
    with CachedImages(watched.model, daemon.socket_dir, deadline_s=30):
        first = watched.answer(picture(5))
        watched.model.load_state_dict(random_model(5).state_dict())
        assert torch.equal(watched.answer(picture(5)), Watched(random_model(5)).answer(picture(5)))
        watched.model.load_state_dict(random_model(4).state_dict())
        assert torch.equal(watched.answer(picture(5)), first) and watched.seen == 2


def test_without_a_daemon_and_wrong_calls(tmp_path: Path) -> None:
    watched = Watched(random_model(6))
    with CachedImages(watched.model, tmp_path, deadline_s=0.01):
        assert torch.equal(watched.answer(picture(1)), watched.answer(picture(1))) and watched.seen == 2
        with pytest.raises(KVStoreError, match="is open for this model already"):
            CachedImages(watched.model, tmp_path)
    with pytest.raises(KVStoreError, match="no vision-language model"):
        CachedImages(tiny_model(), tmp_path)
