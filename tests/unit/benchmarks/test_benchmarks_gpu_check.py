"""The questions to a GPU judge what they see: tests that were skipped, packages that are missing, memory that settles,
a library in a wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reference.benchmark_scripts import BENCHMARKS, importable

NO_HEALTH = """
E       kvstore_client.testing.daemon.DaemonDied: exit status 1 before ready:
E         File "/src/kvstore/kvstored/rpc/server.py", line 22, in <module>
E       ModuleNotFoundError: No module named 'grpc_health'
"""
NOTHING_IS_INSTALLED = """
import sys
for each in ("numpy", "grpc", "google", "xxhash", "cuda", "pytest", "hypothesis", "packaging"):
    sys.modules[each] = None
"""


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


@pytest.mark.parametrize(
    ("status", "text", "holds", "says"),
    [
        (0, "...\n3 passed in 1.00s", True, "test_it.py: 3 passed in 1.00s"),
        (0, "1 passed, 12 skipped in 7.00s", True, "1 passed, 12 skipped"),
        (0, "SKIPPED [2] a.py:3: no cuda\n2 skipped in 0.10s", None, "nothing was asked: 2 skipped in 0.10s; SKIPPED"),
        (5, "no tests ran in 0.01s", None, "nothing was asked: no tests ran"),
        (5, "3 deselected in 0.01s", None, "nothing was asked: 3 deselected"),
        (1, "FAILED a.py::b - assert 1 == 2\n1 failed, 2 passed in 1.00s", False, "FAILED a.py::b"),
        (1, "FAILED a.py::b - assert 1 == 2\n1 failed, 2 skipped in 1.00s", False, "FAILED a.py::b"),
        (4, "ImportError while loading conftest\nE   ModuleNotFoundError: No module named 'grpc'", None,
         "not asked: grpcio is not installed"),
        (1, f"{NO_HEALTH}ERROR a.py::b - kvstore_clie...\n2 errors in 1.00s", None,
         "not asked: grpcio-health-checking is not installed"),
        (1, f"{NO_HEALTH}ERROR a.py::b - assert 0\n1 passed, 1 error in 1.00s", False, "1 passed, 1 error"),
        (1, "ModuleNotFoundError: No module named 'kvstored.rpc'\n1 error in 1.00s", False, "1 error in 1.00s"),
        (None, "!! KeyboardInterrupt !!\n2 passed in 9.00s", None, "not done within 9 s; 2 passed in 9.00s"),
        (None, "FAILED a.py::b\n1 failed, 2 passed in 9.00s", False, "not done within 9 s; 1 failed"),
        (None, "2 passed in 7.00s\nin rmtree\nKeyboardInterrupt", None, "not done within 9 s; 2 passed in 7.00s"),
        (None, "", False, "not done within 9 s"),
    ],
)  # fmt: skip
def test_a_file_of_tests_is_judged_by_what_was_asked(
    status: int | None, text: str, holds: bool | None, says: str
) -> None:
    from support.gpu_suites import judged

    answer = judged("test_it.py", status, text, 9.0)
    assert answer.holds is holds and says in answer.says and "\n" not in answer.says, answer


def test_a_package_is_named_as_it_is_installed_and_a_module_of_ours_is_none() -> None:
    from support.gpu_answers import lacking, one_line, why_not_imported

    assert lacking("ModuleNotFoundError: No module named 'torch.cuda'") == "torch is not installed"
    both = "ModuleNotFoundError: No module named 'grpc'\nModuleNotFoundError: No module named 'xdist'"
    assert lacking(both) == "grpcio, xdist are not installed"
    assert lacking("ModuleNotFoundError: No module named 'kvstore_proto.v1'") == lacking("KeyError: 'grpc'") == ""
    assert why_not_imported(ImportError("libcudart.so.12: cannot open")) == "ImportError: libcudart.so.12: cannot open"
    assert one_line("the daemon did not start:\n  a log\n  of lines\n") == "the daemon did not start: ... of lines"


def test_the_questions_are_listed_whatever_is_missing_and_a_mistake_is_one_line(tmp_path: Path) -> None:
    """The imports of a question come when it is asked: what needs less can be asked all the same."""
    (tmp_path / "sitecustomize.py").write_text(NOTHING_IS_INSTALLED)

    def check(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), *arguments]
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    listed = check("--list")
    assert listed.returncode == 0 and "\nclient-pool " in listed.stdout and not listed.stderr, listed.stderr
    wrong = check("--only", "copys")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "gpu-check: there is no question 'copys': did you mean copies? --list prints all\n"
    lacking = check("--only", "copies")
    assert (lacking.returncode, lacking.stdout) == (2, "") and lacking.stderr.count("\n") == 1, lacking.stderr
    assert lacking.stderr.startswith("gpu-check: ") and "numpy is not installed" in lacking.stderr


def test_free_memory_is_taken_once_it_has_settled() -> None:
    from support.gpu_memory import SAME_S, settled_bytes

    clock = [0.0]

    class Recovering:
        """A device that takes memory back until 2.5 s have passed."""

        def memory_bytes(self) -> tuple[int, int]:
            return min(int(clock[0] * 2), 5), 10

    def pause(seconds: float) -> None:
        clock[0] += seconds

    options: dict[str, Any] = {"clock": lambda: clock[0], "pause": pause}
    assert settled_bytes(Recovering(), **options) == 5 and 2.5 + SAME_S <= clock[0] < 3.0 + SAME_S
    clock[0] = 0.0
    assert settled_bytes(Recovering(), 3, **options) == 3 and clock[0] < 2.0, "as soon as it is there"
    clock[0] = 0.0
    assert settled_bytes(Recovering(), 9, **options) == 5 and 10 <= clock[0] < 11, "lost, but not waited for longer"


def test_cufile_is_looked_for_in_wheels_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support import gpu_memory

    (tmp_path / "nvidia").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    tried = list(gpu_memory.candidates())
    assert tried[0] == "libcufile.so.0" and str(tmp_path / "nvidia" / "cu13" / "lib" / "libcufile.so.0") in tried
