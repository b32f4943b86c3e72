"""docs/api.md says what the docstrings say, docs/state-directory.md what the code of small state does."""

from __future__ import annotations

import runpy

from tests.tidy.tree import ROOT


def test_the_api_reference_is_fresh() -> None:
    page = runpy.run_path(str(ROOT / "docs/make_api.py"))["page"]
    assert (ROOT / "docs/api.md").read_text() == page(), "run `python docs/make_api.py`"


def test_the_page_of_the_state_directory_is_fresh() -> None:
    page = runpy.run_path(str(ROOT / "docs/make_state.py"))["page"]
    assert (ROOT / "docs/state-directory.md").read_text() == page(), "run `python docs/make_state.py`"
