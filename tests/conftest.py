"""The rules of every test: hypothesis without timing rules, since the machines are shared and noisy; no daemon may
leave a damaged directory behind, whichever helper of the tests ran it; and the client's suite of connectors starts its
processes as quickly as the other tests do.
"""

from __future__ import annotations

import os

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # its handlers may wait for ever in a fork; what tests fork uses no gRPC
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else torch's threads spin on processors that other tests need
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's likewise

import contextlib
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

from kvstore_client.testing.daemon import DaemonProcess
from kvstore_cuda.native_build import BuildError
from kvstore_engine.kernels.build import build_kernels
from kvstore_tiers import failpoints
from kvstore_tiers.codecs import native as native_codecs
from tests.reference import examples, forked
from tests.reference.running_daemon import RunningDaemon, assert_no_damage, running_daemon

COMPILED = (build_kernels, native_codecs._made)  # half a minute each, once a machine


def pytest_configure(config: pytest.Config) -> None:
    examples.is_thorough = config.option.markexpr != "not slow"
    settings.register_profile(
        "shared-machine",
        deadline=None,
        max_examples=examples.examples(60),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("shared-machine")


def pytest_collection(session: pytest.Session) -> None:
    """Compile a share of the C++ and import a share of the test files first, where several processes run all tests:
    each needs all of it, and what one has compiled, assertions included, the others only read.
    """
    gc.disable()  # what collecting makes lives as long as the run: no pass over it frees anything
    config = session.config
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    own, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for compile_it in COMPILED[own::count]:
        with contextlib.suppress(BuildError):  # the tests that need it say why they are skipped
            compile_it()
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    for path in files[own::count]:
        before = {*sys.modules}
        try:
            _ = pytest.Module.from_parent(session, path=path).obj
        except (pytest.skip.Exception, pytest.Collector.CollectError, ImportError):  # collecting says why
            for name in {*sys.modules} - before:
                if getattr(sys.modules[name], "__file__", None) == str(path):
                    del sys.modules[name]


def pytest_collection_finish() -> None:
    """Have the garbage collector pass over what lives as long as the run: a million objects of thousands of tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def no_daemon_leaves_damage() -> Iterator[None]:
    """The client's own suite knows no tiers: its daemons' directories are walked here, before they are removed.
    `RunningDaemon` walks its own."""
    clean = DaemonProcess._clean

    def checked_clean(daemon: DaemonProcess) -> None:
        ended = daemon._process is not None and daemon._process.poll() is not None
        try:
            if ended:
                assert_no_damage(daemon.state_dir / "nvme")
        finally:
            clean(daemon)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DaemonProcess, "_clean", checked_clean)
        yield


@pytest.fixture(scope="session", autouse=True)
def the_clients_suite_forks_too() -> Iterator[None]:
    quick = SimpleNamespace(Popen=forked.popen, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore_client.testing.daemon.subprocess", quick)
        patch.setattr("kvstore_client.testing.process.subprocess", quick)
        yield


@pytest.fixture
def nothing_stays_armed() -> Iterator[None]:
    """For tests that arm failpoints in their own process."""
    yield
    failpoints.disarm()


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    """The small daemon that most tests need. A module that needs another one has a fixture of this name."""
    with running_daemon() as running:
        yield running
