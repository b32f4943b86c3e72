"""What several of the unit tests share."""

from __future__ import annotations

import pytest

from tests.reference.fake_daemon import FakeDaemon


@pytest.fixture(params=["grpc", "direct"])
def each_stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test twice: over gRPC, and over direct streams."""
    monkeypatch.setattr(FakeDaemon, "is_direct", request.param == "direct")
