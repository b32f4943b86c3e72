"""The compiled code of codecs and NumPy's give the same bytes, for every instruction set that this processor has."""

from __future__ import annotations

import ctypes as ct

import numpy as np
import pytest

from kvstore_cuda.native_build import AVX2, build_library
from kvstore_proto.arena import payload_checksum
from kvstore_proto.number_types import NUMBER_TYPES
from kvstore_tiers.codecs import Codec, Encoded, Undecodable, codec_named, context, native
from kvstore_tiers.codecs.context import ContextCodec
from kvstore_tiers.codecs.quantised import QuantisedCodec
from kvstore_tiers.codecs.shapes import ALL_BITS, STATE, PayloadShape, Tensor
from kvstore_tiers.testing.kv_blocks import SHAPES, Block, extreme_blocks, kv_block, kv_shape
from tests.reference import examples
from tests.reference.skips import skip_without_compiler

NAMES = ("int8", "int4")  # NumPy has no code for "context"


@pytest.fixture(scope="module")
def libraries() -> dict[str, ct.CDLL | None]:
    """Return the library for this processor, and among slow tests, as each takes half a minute to compile, one without
    any of its own instructions and one for AVX2 if it has it.
    """
    skip_without_compiler()
    chosen = {"plain": ()} | ({"avx2": AVX2} if native._instructions() else {}) if examples.is_thorough else {}
    found: dict[str, ct.CDLL | None] = {"own": native.wait_for_library()}
    for name, flags in chosen.items():
        path = build_library("codecs", native._FOLDER, native._units(flags), native._HEADERS)
        found[name] = native._declared(ct.CDLL(str(path)))
    assert all(found.values())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_build_gives_the_bytes_of_numpy(
    name: str, libraries: dict[str, ct.CDLL | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = codec_named(name)
    assert codec is not None
    for block in [*(kv_block(number, shape) for number, shape in enumerate(SHAPES)), *extreme_blocks()]:
        monkeypatch.setattr(native._loading, "library", None)
        expected = _both_ways(codec, block)
        for build, library in libraries.items():
            monkeypatch.setattr(native._loading, "library", library)
            assert _both_ways(codec, block) == expected, (build, block[2])


@pytest.mark.parametrize("name", NAMES)
def test_tensors_keep_the_bits_that_the_profile_wants_in_every_build(
    name: str, libraries: dict[str, ct.CDLL | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, chosen = codec_named(name), np.random.default_rng(5)
    assert isinstance(codec, QuantisedCodec)
    for number, plain in enumerate(shape for shape in SHAPES if codec.takes(shape)):
        bears = chosen.choice([ALL_BITS, 4, 8], plain.layers * len(plain.tensors)).astype(np.uint8)
        header, payload, shape = kv_block(number, plain._replace(bears=bears.tobytes()))
        monkeypatch.setattr(native._loading, "library", None)
        encoded, stored, back = expected = _both_ways(codec, (header, payload, shape))
        uniform, _, of_all = _both_ways(codec, (header, payload, plain))
        assert not bears.any() or encoded.nbytes >= uniform.nbytes
        for build, library in libraries.items():
            monkeypatch.setattr(native._loading, "library", library)
            assert _both_ways(codec, (header, payload, shape)) == expected, (build, shape)
        put, got, all_got = (
            np.frombuffer(each, np.uint8).reshape(shape.layers, -1) for each in (payload.tobytes(), back, of_all)
        )
        for at, bits in enumerate(bears.tolist() if stored else ()):
            tensor, where = shape.tensors[at % len(shape.tensors)], slice(at // len(shape.tensors), None)
            own, as_put, as_uniform = (tensor.of(each[where])[0] for each in (got, put, all_got))
            if bits == ALL_BITS:
                assert np.array_equal(own, as_put)
            elif bits <= codec.bits:
                assert np.array_equal(own, as_uniform)


@pytest.mark.slow
def test_every_build_gives_the_same_bytes_of_context(
    libraries: dict[str, ct.CDLL | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = ContextCodec()
    for block in [*(kv_block(number, shape) for number, shape in enumerate(SHAPES)), *extreme_blocks()]:
        made = []
        for library in libraries.values():
            monkeypatch.setattr(native._loading, "library", library)
            made.append(_both_ways(codec, block))
        assert made == [made[0]] * len(made), block[2]
        assert not made[0][1] or made[0][2] == block[1].tobytes()


def _both_ways(codec: Codec, block: Block) -> tuple[Encoded, bytes, bytes]:
    header, payload, shape = block
    target = bytearray(codec.bound(payload.nbytes))
    encoded = codec.encode(header, shape, payload.data, memoryview(target))
    stored, back = bytes(target[: encoded.nbytes]), np.zeros_like(payload)
    if stored:
        codec.decode(memoryview(stored), back.data)
        hashed = np.ones_like(payload)
        assert codec.decode_and_hash(memoryview(stored), hashed.data) == payload_checksum(back)
        assert np.array_equal(hashed, back)
    return encoded, stored, back.tobytes()


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_layer_that_loses_too_much_is_stored_as_it_is(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_compiled:
        skip_without_compiler()
        native.wait_for_library()
    else:
        monkeypatch.setattr(native._loading, "library", None)
    header, payload, shape = kv_block(1, kv_shape(3, 64, 16, 64, "f16"))
    codec, layers = codec_named("int8"), payload.reshape(3, -1)
    assert codec is not None
    shape.tensors[1].of(layers[1:2])[:, :, 0, 0] = 200.0  # one channel takes all the steps of a token
    target, back = bytearray(codec.bound(payload.nbytes)), np.zeros_like(payload)
    encoded = codec.encode(header, shape, payload.data, memoryview(target))
    assert encoded.error is not None and 0 < encoded.error.relative_rms < 0.03
    codec.decode(memoryview(target)[: encoded.nbytes], back.data)
    assert [np.array_equal(one, two) for one, two in zip(layers, back.reshape(3, -1), strict=True)] == [
        False,
        True,
        False,
    ]


def test_a_table_with_bits_that_nothing_keeps_is_undecodable() -> None:
    codec, (header, payload, plain) = codec_named("int4"), kv_block(1, kv_shape(2, 64, 3, 64, "f16"))
    assert isinstance(codec, QuantisedCodec)
    _, stored, back = _both_ways(codec, (header, payload, plain._replace(bears=bytes((8, 4, 4, ALL_BITS)))))
    frame = codec.read(memoryview(stored))
    assert frame.common(memoryview(stored)).tolist() == [8, 4, 4, ALL_BITS] and back != payload.tobytes()
    spoilt = bytearray(stored)
    spoilt[frame.common_at] = 5
    with pytest.raises(Undecodable, match="table of bits"):
        codec.decode(memoryview(spoilt), memoryview(bytearray(payload.nbytes)))


def test_a_thread_does_not_keep_the_memory_for_a_large_state() -> None:
    bfloat = NUMBER_TYPES["bf16"]
    small, large = (
        PayloadShape(8, numbers * 2, (Tensor(STATE, bfloat, 0, 1, 1, numbers, numbers * 2, numbers * 2),))
        for numbers in (1 << 10, 1 << 19)
    )
    kept = context._work_of(small)
    assert context._work_of(large).nbytes > 10 * large.nbytes
    assert context._work_of(small) is kept
