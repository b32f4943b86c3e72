"""Ranks of an SGLang server agree on an answer: two processes, torch's own groups. Skipped by name without torch."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow
RANK = """
import json, sys
from types import SimpleNamespace
import torch.distributed as dist
from kvstore_connectors.sglang.layer_loads import Ranks

rank, store, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
groups = {"tp_cache_group": dist.group.WORLD, "attn_tp_cache_group": None, "attn_cp_cache_group": None}
if kind == "context":
    alone = [dist.new_group([each], backend="gloo") for each in range(2)]
    groups |= {"attn_tp_cache_group": alone[rank], "attn_cp_cache_group": dist.group.WORLD}
if kind == "data":  # attention's ranks are alone: each serves requests of its own
    alone = [dist.new_group([each], backend="gloo") for each in range(2)]
    groups = {"tp_cache_group": alone[rank], "attn_tp_cache_group": alone[rank], "attn_cp_cache_group": None}
ranks = Ranks(SimpleNamespace(**groups))
print(json.dumps([ranks.tp_rank, ranks.tp_size, ranks.all(True), ranks.all(rank == 0), ranks.all(False)]))
"""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("tensor", [[0, 2, True, False, False], [1, 2, True, False, False]]),
        ("context", [[0, 1, True, False, False], [0, 1, True, False, False]]),
        ("data", [[0, 1, True, True, False], [0, 1, True, False, False]]),
    ],
)
def test_one_rank_that_cannot_is_enough(kind: str, expected: list[object], tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), kind], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [json.loads(process.communicate()[0]) for process in processes] == expected


def test_a_rank_without_groups_decides_alone() -> None:
    code = """
from types import SimpleNamespace
from kvstore_connectors.sglang.layer_loads import Ranks
ranks = Ranks(SimpleNamespace(tp_cache_group=None, attn_tp_cache_group=None, attn_cp_cache_group=None))
print(ranks.tp_rank, ranks.tp_size, ranks.all(True), ranks.all(False))
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "True", "False"]
