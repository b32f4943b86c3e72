"""The default number of threads: physical cores, a container's quota, one core left to the rest."""

from pathlib import Path

import pytest

from kvstore_engine import threads


def _topology(folder: Path, siblings: list[str]) -> Path:
    for cpu, text in enumerate(siblings):
        path = folder / f"cpu{cpu}" / "topology"
        path.mkdir(parents=True)
        (path / "thread_siblings_list").write_text(text + "\n")
    return folder


def test_hyperthreads_count_once(tmp_path: Path) -> None:
    topology = _topology(tmp_path, ["0,2", "1,3", "0,2", "1,3"])
    assert threads.physical_cores({0, 1, 2, 3}, topology) == 2
    assert threads.physical_cores({0, 2}, topology) == 1
    assert threads.physical_cores({0, 1, 9}, topology) == 3  # a processor that is not described counts
    assert threads.physical_cores(set(), topology) == 1


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("junk", None), ("1 0", None)]
)
def test_a_containers_quota(tmp_path: Path, text: str, cores: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert threads.cpu_quota(tmp_path / "cpu.max") == cores
    assert threads.cpu_quota(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("cores", "quota", "expected"), [(1, None, 1), (2, None, 2), (3, None, 3), (4, None, 3), (64, 8.5, 7), (8, 0.5, 1)]
)
def test_one_core_is_left_where_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, cores: int, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr(threads, "physical_cores", lambda cpus, topology: cores)
    monkeypatch.setattr(threads, "cpu_quota", lambda path: quota)
    assert threads.default_threads() == expected
