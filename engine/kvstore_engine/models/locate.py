"""The user's ways to write a model, and the file that is meant.

The module owns the syntax `NAME[:QUANT]` or `PATH[:QUANT]`. A path that exists is always a path, even under the name of
a known model.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from kvstore_engine.errors import UsageError
from kvstore_engine.gguf.open_file import is_stored
from kvstore_engine.models.cache import models_directory
from kvstore_engine.models.convert import QUANTISATIONS, convert, converted_path
from kvstore_engine.models.fetch import fetch
from kvstore_engine.models.known import KNOWN_MODELS, KnownModel
from kvstore_engine.models.terms import Agreement, ask_on_terminal


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A model that a user named: either a `known` model or the `path` of a file. `quant` is the quantisation to convert
    it to; None leaves it unchanged.
    """

    known: KnownModel | None
    path: Path | None
    quant: str | None


def parse_reference(text: str, quant: str | None = None) -> ModelReference:
    """Return the model that `text` names: a known name or a path, with or without `:QUANT` behind it. `quant` is the
    quantisation from a separate option. A known model without either gets its default quantisation. Raises UsageError
    if there is no such model, or if both name different quantisations.
    """
    if Path(text).exists():
        return ModelReference(None, Path(text), _checked(quant))
    base, colon, suffix = text.rpartition(":")
    name = base if colon and suffix in QUANTISATIONS else text
    if name != text:
        if quant not in (None, suffix):
            raise UsageError(f"{text!r} asks for {suffix} and --quant for {quant}: give one of them")
        quant = suffix
    known = KNOWN_MODELS.get(name.lower())
    if known is not None:
        return ModelReference(known, None, _checked(quant) or known.default_quant)
    if Path(name).exists():
        return ModelReference(None, Path(name), _checked(quant))
    wrong = f"; {suffix!r} is no quantisation ({', '.join(QUANTISATIONS)})" if base.lower() in KNOWN_MODELS else ""
    raise UsageError(f"no model {text!r}: no such file, and the known names are {', '.join(KNOWN_MODELS)}{wrong}")


def locate(
    text: str, quant: str | None = None, agreement: Agreement = ask_on_terminal, sockets: Path | None = None
) -> Path:
    """Return the path of the GGUF file of the model that `text` names, fetched and converted to `quant` if needed.
    `agreement` asks the user to agree to a model's terms. An object of the store, as in kvstore:NAME, is one of the
    daemon whose sockets are in `sockets`. Raises the errors of `fetch` and `convert`.
    """
    if is_stored(Path(text)):
        if quant is not None:
            raise UsageError(f"{text} is used as it was put: put it in the quantisation {quant} instead")
        return Path(text if sockets is None or "?" in text else f"{text}?{sockets}")
    reference = parse_reference(text, quant)
    if reference.known is not None:
        return _locate_known(reference.known, reference.quant, agreement)
    source = reference.path
    assert source is not None
    if source.is_dir():
        raise UsageError(f"{source} is a folder; give a .gguf file in it")
    if reference.quant is None:
        return source
    return convert(source, reference.quant, source.parent if os.access(source.parent, os.W_OK) else models_directory())


def _locate_known(known: KnownModel, quant: str | None, agreement: Agreement) -> Path:
    folder, digest = models_directory(), known.gguf_sha256
    if quant is not None:
        # The registry vouches for the source, so a conversion that exists is found without opening anything.
        ready = converted_path(folder / known.file_name, quant, folder, digest)
        if ready.exists():
            return ready
    source = fetch(known, agreement=agreement)
    return source if quant is None else convert(source, quant, folder, digest)


def _checked(quant: str | None) -> str | None:
    if quant is not None and quant not in QUANTISATIONS:
        raise UsageError(f"no quantisation {quant!r}; choose one of {', '.join(QUANTISATIONS)}")
    return quant
