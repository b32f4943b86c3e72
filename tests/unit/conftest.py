"""The fixtures that several of the unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_client import Session
from tests.reference.fake_daemon import FakeDaemon
from tests.reference.twelve_blocks import FINGERPRINT


@pytest.fixture(params=["grpc", "direct"])
def each_stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test twice: over gRPC, and over direct streams."""
    monkeypatch.setattr(FakeDaemon, "is_direct", request.param == "direct")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    """Unit tests run no real one."""
    with FakeDaemon(tmp_path / "s") as running:
        yield running


@pytest.fixture
def session(daemon: FakeDaemon) -> Iterator[Session]:
    with daemon.connect(FINGERPRINT) as opened:
        yield opened
