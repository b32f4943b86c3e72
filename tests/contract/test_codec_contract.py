"""The shipped conformance suite on every codec, and on the one that is made up for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore_tiers.codecs import CODECS, NONE, TESTING_ENVIRONMENT, Codec, codec_named, codec_names
from kvstore_tiers.codecs.context import ContextCodec
from kvstore_tiers.codecs.lossless import LosslessCodec
from kvstore_tiers.codecs.quantised import int4, int8
from kvstore_tiers.testing import CodecContract
from kvstore_tiers.testing.made_up_codec import MadeUpCodec
from kvstore_tiers.testing.transfers import block_with_pattern, encoded
from tests.reference.skips import skip_without_compiler


@pytest.fixture(autouse=True)
def allow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(TESTING_ENVIRONMENT, "1")
    yield


class TestMadeUpCodec(CodecContract):
    def make_codec(self) -> Codec:
        return MadeUpCodec()


@pytest.mark.skipif(bool(LosslessCodec().lacks()), reason="the extra codecs is not installed")
class TestLosslessCodec(CodecContract):
    def make_codec(self) -> Codec:
        codec = codec_named("lossless")
        assert codec is not None
        return codec


class TestContextCodec(CodecContract):
    @pytest.fixture(autouse=True)
    def _needs_a_compiler(self) -> None:
        skip_without_compiler()

    def make_codec(self) -> Codec:
        return ContextCodec()


@pytest.mark.slow
class TestInt8Codec(CodecContract):
    def make_codec(self) -> Codec:
        return int8()


class TestInt4Codec(CodecContract):
    def make_codec(self) -> Codec:
        return int4()


def test_the_made_up_codec_is_offered_to_tests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert codec_names() == (NONE, *CODECS, "made-up", "rounding")
    monkeypatch.delenv(TESTING_ENVIRONMENT)
    assert codec_names() == (NONE, *CODECS)


def test_its_sizes_cannot_be_foretold() -> None:
    """Else the seam is proved for one size alone: some are tiny, some between, some are stored as they are."""
    sizes = [encoded(MadeUpCodec(), *block_with_pattern(number, 300_000)).nbytes for number in range(60)]
    assert min(sizes) < 30_000 and len(set(sizes)) > 8 and max(sizes) == 307_200
