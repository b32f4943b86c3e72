"""A model whose weights are mapped from a file: what happens when that file changes, by name and in place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reference.tiny_transformers import prompt, tiny_model

# isort: split
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvstore_client import Session
from kvstore_connectors.transformers import KVStoreCache, kvstore_session, model_fingerprint
from kvstore_connectors.transformers.fingerprint import written_file
from kvstore_connectors.weight_files import mappings_now
from kvstore_proto.errors import KVStoreError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model" / "model.safetensors"


@pytest.fixture
def model(file: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(file.parent).eval()
    if not any(mapping.path == str(file) for mapping in mappings_now()):
        pytest.skip("this version of Transformers copies weights")
    return loaded


@pytest.fixture
def session(model: PreTrainedModel, tmp_path: Path) -> Iterator[Session]:
    with kvstore_session(model, tmp_path) as opened:
        yield opened


def write_in_place(file: Path) -> None:
    size = file.stat().st_size
    with open(file, "r+b") as opened:
        opened.seek(size // 2)
        opened.write(b"\x11" * (size // 4))


def compute(model: PreTrainedModel, cache: KVStoreCache, **call: Any) -> None:
    with torch.no_grad():
        model(prompt(40), past_key_values=cache, **call)


def test_weights_that_change_in_place_are_another_model(file: Path, model: PreTrainedModel, session: Session) -> None:
    before, cache = model_fingerprint(model), KVStoreCache(session, model)
    write_in_place(file)
    assert model_fingerprint(model).digest() != before.digest()
    compute(model, cache)
    assert "the model has changed" in cache.report.store_reason
    with pytest.raises(KVStoreError, match="weights or configuration differ"):
        KVStoreCache(session, model)


def test_nothing_that_was_computed_while_a_file_was_written_is_stored(
    file: Path, model: PreTrainedModel, session: Session
) -> None:
    cache = KVStoreCache(session, model)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: write_in_place(file))
    compute(model, cache)
    hook.remove()
    assert "was written to while they computed" in cache.report.store_reason
    assert cache.report.waiting_blocks == 0


def test_a_file_that_is_replaced_is_not_the_one_that_is_mapped(
    file: Path, model: PreTrainedModel, session: Session
) -> None:
    before = model_fingerprint(model).digest()
    new = file.with_suffix(".new")
    new.write_bytes(b"\x11" * file.stat().st_size)
    os.replace(new, file)
    cache = KVStoreCache(session, model)
    compute(model, cache)
    assert cache.report.store_reason == "" and model_fingerprint(model).digest() == before


def test_a_file_that_only_looks_otherwise_is_the_same_model(file: Path, model: PreTrainedModel) -> None:
    before = model_fingerprint(model)
    os.utime(file)
    os.chmod(file, 0o600)
    assert written_file(model) == str(file)
    assert model_fingerprint(model) == before
    assert written_file(model) == ""


def test_an_id_does_not_stand_for_weights_that_change(file: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    with kvstore_session(model, tmp_path, model_id="mine") as session:
        cache = KVStoreCache(session, model)
        write_in_place(file)
        compute(model, cache)
        assert "was written to: load the model again" in cache.report.store_reason


def test_a_file_that_was_removed_before_the_session_is_watched_or_refused(
    file: Path, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.link(file, file.with_suffix(".kept"))
    os.unlink(file)
    monkeypatch.setattr(os, "access", lambda *_: False)  # as for users other than root
    with pytest.raises(KVStoreError, match="which was replaced or removed: load the model again"):
        kvstore_session(model, tmp_path)


def test_weights_that_were_copied_have_no_file(file: Path) -> None:
    copied = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16).eval()
    before = model_fingerprint(copied)
    write_in_place(file)
    assert written_file(copied) == "" and model_fingerprint(copied) == before
