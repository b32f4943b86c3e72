"""The fingerprint: what makes two engines share blocks, and what a daemon refuses to take for one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_proto.fingerprint import Fingerprint, FingerprintError, LayerGroup, parse_fingerprint

FP = Fingerprint("m", "d1", groups=(LayerGroup(0, "full", 0, (0, 1), 512),))

OTHER_STATES: list[dict[str, Any]] = [
    {"weights_digest": "d2"},
    {"adapter_digest": "lora"},
    {"rope": "yarn"},
    {"kv_dtype": "q8_0"},
    {"layout": "token-major"},
    {"tokenizer_digest": "t"},
    {"account": "anna"},
    {"weights": "policy", "weights_version": 1},
    {"shard_count": 2},
    {"block_tokens": 128},
    {"engine_block_tokens": 32},
    {"key_hash": "blake2b"},
    {"groups": (LayerGroup(0, "sliding", 4096, (0, 1), 512),)},
    {"groups": (LayerGroup(0, "full", 0, (0, 1), 512, heads=2),)},
]


def test_a_group_is_split_into_ranges_of_consecutive_layers() -> None:
    whole = LayerGroup(3, "latent", 0, tuple(range(2, 9)), 512)
    parts = whole.split(3)
    assert [part.layers for part in parts] == [(2, 3), (4, 5), (6, 7, 8)]
    assert [(part.group_id, part.kind, part.bytes_per_token_per_layer) for part in parts] == [
        (number, "latent", 512) for number in (3, 4, 5)
    ]
    assert whole.split(1) == (whole,)
    split, one = replace(FP, groups=parts), replace(FP, groups=(whole,))
    assert sum(split.payload_bytes(part.group_id) for part in parts) == one.payload_bytes(3)
    assert split.digest() != one.digest(), "their blocks are not each other's"
    for ranges in (0, 8):
        with pytest.raises(FingerprintError, match=f"group 3 has 7 layers: 1..7 ranges, got {ranges}"):
            whole.split(ranges)


def test_round_trip() -> None:
    assert parse_fingerprint(FP.canonical()) == FP


def test_the_name_is_a_label() -> None:
    assert replace(FP, model_name="other").digest() == FP.digest()


@pytest.mark.parametrize("change", OTHER_STATES, ids=lambda change: next(iter(change)))
def test_everything_else_is_identity(change: dict[str, Any]) -> None:
    assert replace(FP, **change).digest() != FP.digest()


def test_each_version_of_weights_has_keys_of_its_own() -> None:
    versions = [replace(FP, weights="policy", weights_version=number) for number in (1, 2, 3)]
    assert len({each.digest() for each in (*versions, FP, replace(versions[0], weights="other"))}) == 5
    assert b"weights_version" not in FP.canonical()
    assert parse_fingerprint(versions[1].canonical()) == versions[1]
    for wrong in ({"weights": "policy"}, {"weights_version": 1}, {"weights": "p", "weights_version": 1 << 53}):
        with pytest.raises(FingerprintError, match="weights_version is from 1 to"):
            replace(FP, **wrong)


def test_without_an_account_a_digest_is_what_it_was_before_there_were_any() -> None:
    assert b"account" not in FP.canonical()
    assert replace(FP, account="anna").digest() != replace(FP, account="bert").digest()
    named = parse_fingerprint(replace(FP, account="anna").canonical())
    assert named.account == "anna" and replace(named, account="").digest() == FP.digest()


def test_heads_are_written_where_they_are_said() -> None:
    said = replace(FP, groups=(replace(FP.groups[0], heads=2),))
    assert b"heads" not in FP.canonical() and b'"heads":2' in said.canonical()
    assert parse_fingerprint(said.canonical()) == said
    with pytest.raises(FingerprintError, match="sizes must not be negative"):
        replace(FP, groups=(replace(FP.groups[0], heads=-1),))


def test_payload_bytes() -> None:
    assert FP.payload_bytes() == 2 * 512 * 64
    with pytest.raises(FingerprintError, match="no layer group 7"):
        FP.payload_bytes(7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights_digest": ""}, "weights_digest is empty"),
        ({"account": "a" * 65}, "at most 64 characters"),
        ({"account": "a\nb"}, "characters that can be printed"),
        ({"key_hash": "md5"}, "key_hash 'md5' is unknown; known: xxh3, blake2b"),
        ({"block_tokens": 961, "engine_block_tokens": 961}, "block_tokens must be 1..960"),
        ({"block_tokens": 60}, "must be a multiple"),
        ({"engine_block_tokens": 0}, "must be a multiple"),
        ({"shard_index": 1}, "not below shard_count"),
        ({"groups": ()}, "1..64 layer groups"),
        ({"groups": (LayerGroup(0), LayerGroup(0))}, "ids repeat"),
        ({"groups": (LayerGroup(0, "dense"),)}, "kind 'dense' is unknown"),
        ({"groups": (LayerGroup(0, bytes_per_token_per_layer=-1),)}, "must not be negative"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FingerprintError, match=message):
        replace(FP, **change)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"null", b'{"groups": 3}', b"\xff", b"[" * 100_000, b"x" * 70_000])
def test_garbage_is_refused_with_a_reason(raw: bytes) -> None:
    with pytest.raises(FingerprintError):
        parse_fingerprint(raw)


def test_unknown_and_mistyped_fields_are_refused() -> None:
    raw = json.loads(FP.canonical())
    with pytest.raises(FingerprintError, match="wrong shape"):
        parse_fingerprint(json.dumps({**raw, "colour": 1}).encode())
    with pytest.raises(FingerprintError, match="block_tokens must be int"):
        parse_fingerprint(json.dumps({**raw, "block_tokens": "64"}).encode())


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"[]", "it must be a JSON object, got list"),
        (b"{}", "it has no field 'model_name'"),
        (b'{"model_name":"m","weights_digest":"w"}', "it has no field 'groups'"),
        (b'{"model_name":"m","weights_digest":"w","groups":[{"group_id":0}]}', "a layer group has no field 'layers'"),
        (b'{"model_name":"m","weights_digest":"w","groups":[3]}', "a layer group must be a JSON object, got int"),
        (b'{"model_name":"m","weights_digest":"w","groups":[],"colour":1}', "a field 'colour' that is not known"),
    ],
)
def test_what_is_missing_or_unknown_is_named(raw: bytes, said: str) -> None:
    with pytest.raises(FingerprintError, match="wrong shape") as caught:
        parse_fingerprint(raw)
    assert said in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(list(json.loads(FP.canonical()))), json_values, max_size=4))
def test_any_json_is_a_fingerprint_or_refused(changes: dict[str, Any]) -> None:
    raw = {**json.loads(FP.canonical()), **changes}
    try:
        parsed = parse_fingerprint(json.dumps(raw).encode())
    except FingerprintError:
        return
    assert parse_fingerprint(parsed.canonical()).digest() == parsed.digest()


@pytest.mark.parametrize("text", ['"\\ud800"', '{"model_name": "\\udfff"}', '{"\\ud800": 1}'])
def test_half_a_character_is_refused(text: str) -> None:
    with pytest.raises(FingerprintError, match="UTF-8") as caught:
        parse_fingerprint(text.encode())
    str(caught.value).encode()  # what is said of it can be sent


def test_a_number_without_end_is_refused() -> None:
    raw = Fingerprint("m", "w").canonical().replace(b'"layers":[]', b'"layers":[1e999]')
    with pytest.raises(FingerprintError, match="wrong shape"):
        parse_fingerprint(raw)
