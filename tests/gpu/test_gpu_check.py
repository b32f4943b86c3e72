"""The questions of `make gpu-check` about the driver and the tier, asked of the emulated driver at small sizes: each
question can be answered, the promises that the emulated driver keeps are seen, and what was answered is not lost.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_client.device import crossover, gather
from kvstore_engine.kernels.cuda.attention import PagedAttention
from kvstore_engine.kernels.cuda.program import KernelProgram
from kvstore_tiers.gpu.streams import PROGRAM
from tests.cuda_shim.build import shim_library
from tests.cuda_shim.launcher import ShimLauncher
from tests.gpu.emulated import compiled, emulated_node
from tests.reference.benchmark_scripts import BENCHMARKS, importable
from tests.reference.running_daemon import eventually
from tests.tidy.tree import ROOT

pytestmark = pytest.mark.slow
PROMISES = ("read-only-register", "read-only-access", "outlives-maker", "direct-storage", "checksums", "worker-kills")
SPEEDS = ("copies", "arena-pool", "client-pool", "resident-get")
OF_ONE_PROGRAM = (
    "decode-one",
    "crossover",
    "beside-transfer",
    "gather-batch",
    "hot-prefix",
)  # others need two kernels of one name

HANGS = """
import pathlib, subprocess, sys
def test_it():
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
    child.wait()
"""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


def check(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | emulated_node(must_emulate=True) | variables
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--small", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def only(*names: str) -> list[str]:
    return [argument for name in names for argument in ("--only", name)]


def test_each_question_to_the_driver_and_the_tier_is_answered(tmp_path: Path) -> None:
    compiled(PROGRAM)
    ended = check(*only(*PROMISES, *SPEEDS), "--json", "--out", str(tmp_path / "out"))
    records = json.loads(ended.stdout)
    answers = {record["question"]: record["answer"] for record in records}
    assert list(answers) == [*PROMISES, *SPEEDS]
    assert {answers[name] for name in PROMISES} == {"yes"}, records
    assert {answers[name] for name in SPEEDS} <= {"yes", "NO"}, records
    assert not any("WRONG" in record["says"] for record in records)
    assert all(record["figures"] for record in records if record["question"] in SPEEDS)
    (kept,) = (tmp_path / "out").iterdir()
    assert [json.loads(line) for line in kept.read_text().splitlines()] == records


def test_kills_are_questions() -> None:
    names = [*(f"kills-of-{each}" for each in ("daemon", "worker", "engines")), "kills-mixed"]
    ended = check(*only(*names), "--json")
    records = json.loads(ended.stdout)
    assert [(record["question"], record["answer"]) for record in records] == [(name, "yes") for name in names], records
    assert all(record["figures"] == {"kills": 2.0, "kept": 1.0, "lost bytes": 0.0} for record in records), records


def test_questions_about_kernels_are_answered_by_launches_and_graphs_of_a_device(scripts: None) -> None:
    from support.gpu_kernels import BF16

    programs = PagedAttention(ShimLauncher(), BF16).program, KernelProgram.of("blocks.cu")
    for program in programs:
        compiled(program)
    libraries = ":".join(str(shim_library(program)) for program in programs)
    ended = check(*only(*OF_ONE_PROGRAM), "--json", EMULATED_CUDA_KERNELS=libraries)
    records = json.loads(ended.stdout)
    assert [record["question"] for record in records] == list(OF_ONE_PROGRAM)
    assert {record["answer"] for record in records} <= {"yes", "NO"}, records
    assert all(record["figures"] for record in records)


def test_whole_engines_are_not_compared_where_torch_has_no_device() -> None:
    pytest.importorskip("transformers", reason="needs the extra transformers")
    names = ["engine-decode", "engine-decode-1b"]
    records = json.loads(check(*only(*names), "--json").stdout)
    assert [(record["question"], record["answer"]) for record in records] == [(name, "unknown") for name in names]
    assert all("finds no CUDA device" in record["says"] for record in records), records


def test_the_clients_kernel_moves_the_right_bytes_out_of_a_read_only_arena() -> None:
    compiled(gather.PROGRAM)
    variables = {"EMULATED_CUDA_KERNELS": str(shim_library(gather.PROGRAM)), crossover.VARIABLE: ""}
    (record,) = json.loads(check(*only("client-gather"), "--json", **variables).stdout)
    assert record["answer"] == "yes" and "moves the right bytes" in record["says"], record
    assert set(record["figures"]) == {f"{way}, KiB at most" for way in crossover.WAYS}


def test_arrays_on_the_device_are_where_the_driver_reads_their_bytes() -> None:
    """No library takes an emulated device: the answer says so, and what was seen without one."""
    compiled(PROGRAM)
    (record,) = json.loads(check(*only("arrays"), "--json").stdout)
    assert record["answer"] == "unknown" and record["figures"] == {"wrong by the driver": 0.0}, record
    assert "of 32 arrays of 64 KiB are wrong: 0 by the driver; torch for CUDA and CuPy are not" in record["says"]


def test_whole_engines_are_unknown_without_vllm(tmp_path: Path) -> None:
    ended = check(*only("vllm", "vllm-connector"), KVSTORED_VLLM_PYTHON=str(tmp_path / "python"))
    assert ended.returncode == 0
    lines = ended.stdout.splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == ["unknown vllm", "unknown vllm-connector"]
    assert all(f"no {tmp_path}/python: pip install vllm" in line for line in lines)


def test_a_promise_that_does_not_hold_is_seen() -> None:
    ended = check(*only("read-only-register"), EMULATED_CUDA_READ_ONLY_REGISTER="0")
    assert (
        ended.returncode == 1 and "NO      read-only-register: a memfd that is mapped read-only CANNOT" in ended.stdout
    )


def test_a_question_that_breaks_or_hangs_ends_neither_the_run_nor_what_was_answered(tmp_path: Path) -> None:
    faults = {"EMULATED_CUDA_FAULTS": "cuMemSetAccess:1=hang"}
    ended = check(*only("copies", "direct-storage"), "--out", str(tmp_path), "--limit", "10", **faults)
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    assert lines[1].startswith("FAILED  copies: no answer within") and lines[2].startswith("yes     direct-storage:")
    faults = {"EMULATED_CUDA_FAULTS": "cuMemHostRegister:1=kill"}
    ended = check(*only("copies"), "--out", str(tmp_path), **faults)
    assert "FAILED  copies: its process died" in ended.stdout
    (kept,) = tmp_path.iterdir()
    assert [json.loads(line)["answer"] for line in kept.read_text().splitlines()] == ["FAILED", "yes", "FAILED"]


def of_records(path: Path) -> list[dict[str, Any]]:
    (kept,) = path.iterdir()
    return [json.loads(line) for line in kept.read_text().splitlines()]


def test_a_failure_keeps_its_traceback_and_a_hang_where_it_stands(tmp_path: Path) -> None:
    """The traceback is in the one file of answers: beside a line that says what failed."""
    check(*only("copies"), "--out", str(tmp_path), EMULATED_CUDA_FAULTS="cuMemSetAccess:1=801")
    ended = check(*only("copies"), "--out", str(tmp_path), "--limit", "8", EMULATED_CUDA_FAULTS="cuMemSetAccess:1=hang")
    failed, hung = of_records(tmp_path)
    assert failed["says"] == "DriverError: cuMemSetAccess: CUDA_ERROR_NOT_SUPPORTED"
    assert "Traceback (most recent call last)" in failed["output"] and "gpu_copies.py" in failed["output"]
    assert hung["says"] == "no answer within 8 s" and "most recent call first" in hung["output"]
    assert "in map" in hung["output"] and "gpu_copies.py" in hung["output"]
    assert ended.stderr == "", "the output is in the file"
    ended = check(*only("copies"), EMULATED_CUDA_FAULTS="cuMemSetAccess:1=801")
    assert "Traceback" in ended.stderr and "Traceback" not in ended.stdout, "where there is no file"


def test_what_was_known_when_the_time_was_over_is_kept(tmp_path: Path) -> None:
    """The way to the device has been measured, the one back hangs."""
    faults = {"EMULATED_CUDA_FAULTS": "cuMemcpyDtoHAsync:1=hang"}
    ended = check(*only("copies"), "--out", str(tmp_path), "--limit", "8", **faults)
    (record,) = of_records(tmp_path)
    assert (ended.returncode, record["answer"]) == (3, "left")
    assert record["says"].startswith("no answer within 8 s; known until then: to the device: one copy")
    assert {"to the device, GB/s", "to the device, 64 KiB"} <= set(record["figures"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_the_question_and_keeps_what_was_answered(number: int, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--small", "--out", str(tmp_path)]
    faults = {"EMULATED_CUDA_FAULTS": "cuMemcpyDtoHAsync:1=hang"}
    environment = os.environ | emulated_node(must_emulate=True) | faults
    command += only("direct-storage", "copies", "checksums")
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            assert eventually(lambda: any("to the device" in each.read_text() for each in tmp_path.glob("running-*")))
            run.send_signal(number)
            text, errors = run.communicate(timeout=60)
        finally:
            run.kill()
    assert (run.returncode, errors) == (130, "")
    direct, copies = of_records(tmp_path)
    assert (direct["answer"], copies["answer"]) == ("yes", "left"), text
    assert copies["says"].startswith("interrupted; known until then: to the device: one copy")


def test_a_package_that_a_daemon_misses_makes_no_answer(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['grpc_health'] = None\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    names = "read-only-access", "resident-get", "kills-mixed", "test-daemon-gpu-tier"
    ended = check(*only(*names), "--json", PYTHONPATH=paths)
    records = json.loads(ended.stdout)
    assert [record["answer"] for record in records] == ["yes", "unknown", "unknown", "unknown"], records
    assert all(record["says"].endswith("grpcio-health-checking is not installed") for record in records[1:]), records


def asked_of(place: str, **sizes: float) -> str:
    """Return the answer of a function at small sizes but these, over an emulated device with room for them."""
    module, _, function = place.rpartition(".")
    sizes = {"tools_s": 300.0} | sizes
    program = (
        f"from dataclasses import replace\nfrom support.gpu_answers import FULL, SMALL\nfrom support.{module} import "
        f"{function}\nprint({function}(0, replace({'FULL' if 'blocks' in sizes else 'SMALL'}, **{sizes})))"
    )
    environment = os.environ | emulated_node(256 << 20, must_emulate=True)
    environment["PYTHONPATH"] = os.pathsep.join([str(BENCHMARKS), *filter(None, sys.path)])
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True).stdout


def test_client_pool_has_room_for_blocks_of_full_size() -> None:
    """The room is beside staging, the ledger, headers and what whole arenas leave over."""
    says = asked_of("gpu_client_pool.client_pool", blocks=8, rounds=2, warm_s=0.0)
    assert "says='32 blocks of 2048 KiB by the client: load" in says and "WRONG" not in says, says


def test_workers_that_are_killed_again_and_again_come_back_at_once() -> None:
    """Workers that copied nothing are started ever more rarely: each has copied a block before the next death."""
    says = asked_of("gpu_tier.worker_kills", kills=8)
    assert "8 of 8 kill -9 of the worker: 1 of 1 blocks kept" in says and "Answer(holds=True" in says, says
    assert "'copies between deaths': 8" in says, says


def test_what_no_time_is_left_for_is_said() -> None:
    ended = check(*only("direct-storage"), "--seconds", "1")
    assert ended.returncode == 3 and "left    direct-storage: no time was left" in ended.stdout


def test_every_question_is_listed_and_fits_a_command_of_ten_minutes(scripts: None) -> None:
    import gpu_check

    assert all(question.limit_s < 600 for question in gpu_check.QUESTIONS.values())
    listed = check("--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(gpu_check.QUESTIONS)
    documented = (ROOT / "docs" / "gpu.md").read_text()
    assert [name for name in gpu_check.QUESTIONS if f"`{name}`" not in documented] == []
    commands = re.findall(r"--only %s ' \\\n(.*?)\)", documented, re.DOTALL)
    named = [name for command in commands for name in command.replace("\\\n", " ").split()]
    assert len(commands) == 2 and set(named) <= set(gpu_check.QUESTIONS)
    files = {f"tests/gpu/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    of_hardware = {word for line in listed for word in line.split() if word in files}
    assert files - of_hardware == {
        "tests/gpu/test_device_every_call.py",
        "tests/gpu/test_device_gather.py",
        "tests/gpu/test_emulated_driver.py",
        "tests/gpu/test_emulated_kernels.py",
        "tests/gpu/test_gpu_check.py",
        "tests/gpu/test_gpu_every_call.py",
    }


def test_a_file_of_tests_is_judged_and_bounded(scripts: None, tmp_path: Path) -> None:
    from dataclasses import replace

    from support.gpu_answers import SMALL
    from support.gpu_suites import suite

    path = tmp_path / "test_it.py"
    path.write_text("import os\ndef test_it():\n    assert os.environ['KVSTORED_TEST_GPU'] == 'hardware'\n")
    answer = suite(path, 0, SMALL)
    assert answer.holds and answer.figures == {"passed": 1.0}, answer
    path.write_text("def test_it():\n    assert False\n")
    answer = suite(path, 0, SMALL)
    assert answer.holds is False and answer.figures == {"failed": 1.0} and "FAILED" in answer.says
    path.write_text(HANGS)
    answer = suite(path, 0, replace(SMALL, tools_s=10.0))
    assert answer.holds is False and "not done within 10 s" in answer.says
    child = Path(f"/proc/{int((tmp_path / 'child').read_text())}/cmdline")
    assert eventually(lambda: not child.exists() or not child.read_bytes()), "what it started goes on"


def test_a_tool_is_judged_by_its_summary_and_named_where_it_is_missing(
    scripts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support import gpu_suites
    from support.gpu_answers import SMALL

    monkeypatch.setenv("PATH", str(tmp_path))
    if gpu_suites.sanitizer() is None:
        answer = gpu_suites.sanitized("memcheck", 0, SMALL)
        assert answer.holds is None and "pip install 'nvidia-cuda-sanitizer-api>=13'" in answer.says
    tool = tmp_path / "compute-sanitizer"
    for status, errors in ((0, 0), (66, 3), (1, None)):
        summary = "" if errors is None else f"echo '========= ERROR SUMMARY: {errors} errors'"
        tool.write_text(f'#!/bin/sh\necho "$@"\n{summary}\nexit {status}\n')
        tool.chmod(0o755)
        answer = gpu_suites.sanitized("racecheck", 0, SMALL)
        assert answer.holds is (status == 0)
        said = "no summary, status 1: --tool racecheck" if errors is None else f"ERROR SUMMARY: {errors} errors"
        assert answer.says.startswith(f"racecheck over every kernel: {said}")
        assert errors is not None or "-m support.gpu_launches --device 0" in answer.says
