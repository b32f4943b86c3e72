"""Encoder outputs in real vLLM engines: read after a restart and from another folder, never another model's.

Scheduler and worker run in the engine's process, which counts images: one that missed was encoded. What engines do with
each other's outputs is tried with two of them; roles, and what fails, with the connector's two sides alone.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.reference.running_daemon import RunningDaemon
from tests.reference.tiny_llava import IMAGE_SIZE, IMAGE_TOKEN, export
from tests.vllm.engine_process import Answer, EngineProcess

PROMPT = [1, 9, IMAGE_TOKEN, 10, 11]
PATIENT = {"connect_timeout_ms": 30_000, "lookup_deadline_ms": 30_000, "save_deadline_ms": 30_000}


def picture(path: Path, seed: int, *, changed: bool = False) -> Path:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    pixels[3, 4, 1] ^= changed
    Image.fromarray(pixels).save(path, "PNG")
    return path


def test_outputs_are_those_of_these_weights_and_these_pixels(
    daemon: RunningDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("without_torchvision")))
    transfer = {"ec_connector_extra_config": {"socket": str(daemon.socket_dir), **PATIENT}}
    usual = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 64, "one_process": True,
             "limit_mm_per_prompt": {"image": 1}}  # fmt: skip

    def ask(model: Path, images: list[Path], **spec: Any) -> Answer:
        """Return the answers of a new engine, one at a time, as equal logprobs need."""
        time.sleep(0.1)  # weights as young as the process are refused
        with EngineProcess(
            tmp_path / "log", python=sys.executable, model=str(model), encoder_transfer=transfer, **usual | spec
        ) as engine:
            found = [engine.ask([PROMPT], 8, images=[str(each)], sampling={"logprobs": 1}) for each in images]
        whole = {"tokens": [each.tokens for each in found], "logprobs": [each.logprobs for each in found]}
        return Answer(**vars(found[-1]) | whole)

    images = [picture(tmp_path / f"{seed}.png", seed) for seed in (1, 2)]
    folder = export(tmp_path / "here", seed=0)
    first = ask(folder, images)
    assert (first.encoded, first.restored) == (2, 0)

    copied = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    other = ask(copied, [*images, picture(tmp_path / "changed.png", 2, changed=True)])
    assert (other.encoded, other.restored) == (1, 2)
    assert (other.tokens[:2], other.logprobs[:2]) == (first.tokens, first.logprobs)

    export(copied, seed=7)  # other weights under the same name
    replaced = ask(copied, images)
    assert (replaced.encoded, replaced.restored) == (2, 0) and replaced.logprobs != first.logprobs
    dtype = ask(folder, images, dtype="bfloat16")
    assert (dtype.encoded, dtype.restored) == (2, 0)


class Sides:
    """The scheduler's and the worker's connector of one engine, with steps of one image."""

    def __init__(self, socket: Path, role: str = "ec_both", weights: str = "w") -> None:
        from vllm.config import ECTransferConfig
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

        from kvstore_connectors.vllm import KVStoreECConnector

        settings = {"socket": str(socket), "weights_digest": weights, **PATIENT}
        config = SimpleNamespace(
            ec_transfer_config=ECTransferConfig(
                ec_connector="KVStoreECConnector", ec_role=role, ec_connector_extra_config=settings
            ),
            model_config=SimpleNamespace(
                model="m", dtype="torch.float32", quantization=None, hf_config=SimpleNamespace(to_dict=dict)
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
            device_config=SimpleNamespace(device_type="cpu"),
        )
        self.scheduler = KVStoreECConnector(config, ECConnectorRole.SCHEDULER)
        self.worker = KVStoreECConnector(config, ECConnectorRole.WORKER)

    def step(self, feature: Any, output: Any, between: Callable[[], object] = lambda: None) -> bool:
        """Return whether the image was restored; then it must be `output`."""
        import torch

        request = SimpleNamespace(mm_features=[feature])
        assert self.scheduler.ensure_cache_available(request, 0)
        is_there = self.scheduler.has_cache_item(feature.identifier)
        between()
        assert self.scheduler.has_cache_item(feature.identifier) == is_there
        self.scheduler.update_state_after_alloc(request, 0)
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(None))
        cache: dict[str, torch.Tensor] = {}
        if self.worker.is_consumer:
            self.worker.start_load_caches(cache)
        if is_there and self.worker.is_consumer:
            assert torch.equal(cache[feature.identifier], output)
        elif not is_there:
            cache[feature.identifier] = output
            self.worker.save_caches(encoder_cache=cache, mm_hash=feature.identifier)
        self.worker.clear_connector_metadata()
        return is_there

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def feature(seed: int, *, identifier: str = "", mm_hash: str | None = None, has_data: bool = True) -> Any:
    import torch

    identifier = identifier or f"{seed:064x}"
    pixels = torch.full((3, 4, 4), float(seed))
    data = {"pixel_values": SimpleNamespace(data=pixels)} if has_data else None
    return SimpleNamespace(identifier=identifier, mm_hash=mm_hash or identifier, modality="image", data=data)


def test_each_role_does_its_part(daemon: RunningDaemon) -> None:
    import torch

    output = torch.randn(16, 128)
    both, consumer, producer = (Sides(daemon.socket_dir, role) for role in ("ec_both", "ec_consumer", "ec_producer"))
    assert [consumer.step(feature(1), output), both.step(feature(1), output)] == [False, False]
    assert [consumer.step(feature(1), output), both.step(feature(1), output)] == [True, True]
    assert [producer.step(feature(1), output), producer.step(feature(2), output)] == [True, False]
    assert consumer.step(feature(2, identifier="a" * 64), output)  # by content, whatever vLLM calls it
    other = Sides(daemon.socket_dir, weights="of another training")
    assert not other.step(feature(1), output)
    for each in (both, consumer, producer, other):
        each.close()


def test_what_is_lost_between_two_calls_is_still_restored(daemon: RunningDaemon) -> None:
    import torch

    output, sides = torch.randn(700, 512).bfloat16(), Sides(daemon.socket_dir, weights="lost")
    assert not sides.step(feature(1), output)

    def lose() -> None:
        daemon.drop("host", discard=True)

    assert sides.step(feature(1), output, between=lose)
    sides.close()


def test_items_without_data_and_with_adapters_and_without_a_daemon(daemon: RunningDaemon, tmp_path: Path) -> None:
    import torch

    output, sides = torch.randn(4, 8), Sides(daemon.socket_dir, weights="data")
    named = feature(1, identifier="user's uuid", has_data=False)
    assert [sides.step(named, output), sides.step(named, output)] == [False, True]
    assert not sides.step(feature(2, identifier="other uuid", has_data=False), output)
    adapted = feature(3, identifier="lora:hash", mm_hash="hash")
    assert [sides.step(adapted, output), sides.step(adapted, output)] == [False, False]
    sides.close()


def test_a_wrong_setting_is_refused(daemon: RunningDaemon) -> None:
    from vllm.config import ECTransferConfig
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

    from kvstore_connectors.vllm import KVStoreECConnector

    wrong = ECTransferConfig(ec_connector="c", ec_role="ec_both", ec_connector_extra_config={"sockets": "/x"})
    with pytest.raises(ValueError, match="did you mean 'socket'"):
        KVStoreECConnector(SimpleNamespace(ec_transfer_config=wrong), ECConnectorRole.SCHEDULER)
