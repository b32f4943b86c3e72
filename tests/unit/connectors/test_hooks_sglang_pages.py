"""Names of SGLang's pages, and the prefixes several pools can restore: what needs neither SGLang nor torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_connectors.page_keys import PageKeys
from kvstore_connectors.sglang.pages import BackendMisconfigured, ending_in, namespace, whole_prefixes

HASHES = ["a" * 64, "b" * 64, "c" * 64]


def fingerprint(*, dtype: str = "torch.bfloat16", layout: str = "MHA/page_first", page_tokens: int = 64, **fields: Any):
    """The namespace of one rank; `fields` as SGLang's HiCacheStorageConfig has them."""
    settings: dict[str, Any] = {
        "model_name": "m", "is_mla_model": False, "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1,
        "attn_cp_rank": 0, "attn_cp_size": 1, "dcp_rank": 0, "dcp_size": 1,
    }  # fmt: skip
    extra = fields.pop("extra", {})
    config = SimpleNamespace(**(settings | fields))
    return namespace(config, dtype=dtype, layout=layout, page_tokens=page_tokens, extra=extra)


@pytest.mark.parametrize(
    "difference",
    [
        {"model_name": "n"},
        {"tp_size": 2},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_size": 2},
        {"dtype": "torch.float16"},
        {"layout": "MHA/page_head"},
        {"page_tokens": 32},
        {"extra": {"weights_digest": "finetuned"}},
        {"extra": {"adapter_digest": "lora"}},
        {"extra": {"kv_dtype": "fp8_e4m3"}},
    ],
)
def test_every_difference_in_a_pages_bytes_changes_the_fingerprint(difference: dict[str, Any]) -> None:
    assert fingerprint(**difference).digest() != fingerprint().digest()


def test_two_types_of_8_bits_share_nothing() -> None:
    types = [fingerprint(dtype="torch.uint8", extra={"kv_dtype": name}).digest() for name in ("fp8_e4m3", "fp8_e5m2")]
    assert types[0] != types[1]


def test_ranks_share_only_what_is_the_same_on_all_of_them() -> None:
    ranks = [fingerprint(tp_rank=rank, tp_size=2, pp_rank=stage, pp_size=2) for rank in (0, 1) for stage in (0, 1)]
    assert len({rank.digest() for rank in ranks}) == 4
    assert {rank.shard_index for rank in ranks} == {0, 1, 2, 3}
    latent = [fingerprint(tp_rank=rank, tp_size=2, is_mla_model=True).digest() for rank in (0, 1)]
    assert latent[0] == latent[1]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"model_name": None}, "weights_digest"),
        ({"page_tokens": 1024}, "pages of 1024 tokens"),
        ({"dtype": "torch.uint8"}, "kv_dtype"),
        ({"extra": {"adapter_digest": 1}}, "adapter_digest.* must be text, got 1"),
        ({"extra": {"weights_digest": True}}, "weights_digest.* must be text"),
    ],
)
def test_a_setting_that_cannot_work_is_reported(mistake: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendMisconfigured, match=message):
        fingerprint(**mistake)


def test_keys_differ_by_page_pool_and_secret() -> None:
    ours = PageKeys(b"s" * 16)
    keys = ours.of(HASHES)
    assert len(set(keys)) == 3
    assert keys == ours.of(HASHES), "the same in every process"
    assert keys[1:] == ours.of(HASHES[1:]), "a page's key does not depend on the batch it comes in"
    assert not set(keys) & set(ours.of(HASHES, "mamba"))
    assert not set(keys) & set(PageKeys(b"t" * 16).of(HASHES))


@given(present=st.lists(st.booleans(), max_size=12), trailing=st.integers(1, 4))
def test_prefixes_are_those_that_a_plain_reading_gives(present: list[bool], trailing: int) -> None:
    lengths = range(1, len(present) + 1)
    assert whole_prefixes(present) == {n for n in lengths if all(present[:n])}
    assert ending_in(present, trailing) == {n for n in lengths if all(present[max(0, n - trailing) : n])}
