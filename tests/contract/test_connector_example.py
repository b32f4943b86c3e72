"""The connector that docs/connectors.md shows is a whole one: it passes the suite that the same page explains."""

from __future__ import annotations

import re

import pytest

from kvstore_client.testing import ConnectorContract
from tests.tidy.tree import ROOT


@pytest.mark.slow
class TestDocumentedConnector(ConnectorContract):
    engine = "toy_engine:open_engine"

    @pytest.fixture(autouse=True)
    def toy_engine(self, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The page's code as a module that the engine's processes can import."""
        page = (ROOT / "docs" / "connectors.md").read_text()
        found = re.search(r"<!-- connector -->\n```python\n(.*?)```", page, re.DOTALL)
        assert found is not None
        (tmp_path / "toy_engine.py").write_text(found[1])
        monkeypatch.syspath_prepend(tmp_path)
