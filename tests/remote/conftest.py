"""Every test here needs the extra "remote"."""

from __future__ import annotations

import pytest

pytest.importorskip("redis", reason="needs the extra 'remote'")
pytest.importorskip("cryptography", reason="needs the extra 'remote'")
