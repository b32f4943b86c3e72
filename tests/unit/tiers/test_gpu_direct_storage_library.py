"""The library of the tests that stands for kvikio can be called as kvikio itself, whose files are read, not loaded."""

from __future__ import annotations

import ast

import pytest

from tests.gpu.emulated_storage import LIBRARY
from tests.reference.package_sources import PackageSources, packages
from tests.reference.signatures import differences, signature_of

FOUND = packages("kvikio-cu13", "kvikio")
if not FOUND:
    pytest.skip("kvikio is not here: pip install '.[gds]', or make check-wheels", allow_module_level=True)

EMULATED = PackageSources("the tests'", LIBRARY)


@pytest.mark.parametrize("kvikio", FOUND, ids=lambda sources: sources.name)
def test_what_the_worker_calls_is_in_kvikio_with_the_same_parameters(kvikio: PackageSources) -> None:
    assert kvikio.definition("kvikio", "CuFile") is not None
    for name in ("CuFile", "IOFuture"):
        ours, theirs = EMULATED.methods("kvikio", name), kvikio.methods("kvikio.cufile", name)
        called = [method for method in ours if not method.startswith("_") or (name, method) == ("CuFile", "__init__")]
        assert called and set(called) <= set(theirs), name
        for method in called:
            assert not differences(signature_of(theirs[method]), signature_of(ours[method])), (name, method)


@pytest.mark.parametrize("kvikio", FOUND, ids=lambda sources: sources.name)
def test_cufile_is_started_without_arguments(kvikio: PackageSources) -> None:
    found = [sources.definition("kvikio.cufile_driver", "driver_open") for sources in (EMULATED, kvikio)]
    ours, theirs = (signature_of(one) for one in found if isinstance(one, ast.FunctionDef))
    assert not differences(theirs, ours)
