"""The names of devices that a model can run on, and the executor of each.

Pure: it loads neither ggml nor torch. `cpu` is ggml's; `cuda` and `cuda:N` are torch's with the engine's CUDA kernels;
`torch:cpu` runs torch's step on the processor, slowly, to compare the two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvstore_engine.errors import UsageError

CPU, TORCH_CPU = "cpu", "torch:cpu"
DEVICE_HELP = (
    "what computes: cpu (default), cuda or cuda:N (bf16, needs the extra `torch`; not yet run on hardware), or "
    "torch:cpu, which is the GPU's step on the processor, slowly, for comparisons"
)
_CUDA = re.compile(r"cuda(?::(\d{1,3}))?")
SCALED_KV_TYPES = ("int8", "fp8")  # of one byte, with a float scale for each token and head; fp8 is e4m3
_TORCH_KV_TYPES = ("f16", "bf16", "f32", *SCALED_KV_TYPES)
_CPU_KV_TYPES = ("f16", "bf16", "f32", "q8_0", "q4_0")
KV_TYPES = tuple(dict.fromkeys((*_CPU_KV_TYPES, *_TORCH_KV_TYPES)))


@dataclass(frozen=True, slots=True)
class DeviceName:
    """The name of a device that computes a model. `torch_name` is the name that torch uses, or "" if ggml computes on
    the processor.
    """

    name: str
    torch_name: str = ""

    @classmethod
    def parse(cls, text: str) -> DeviceName:
        """Return the device that `text` names. Raises UsageError for an unknown name."""
        if text == CPU:
            return cls(CPU)
        if text == TORCH_CPU:
            return cls(TORCH_CPU, "cpu")
        if match := _CUDA.fullmatch(text):
            name = f"cuda:{int(match[1] or 0)}"
            return cls(name, name)
        raise UsageError(f"device {text!r} is unknown: choose cpu, cuda, cuda:N or {TORCH_CPU}")

    @property
    def is_torch(self) -> bool:
        return bool(self.torch_name)

    @property
    def is_cuda(self) -> bool:
        return self.torch_name.startswith("cuda")

    @property
    def index(self) -> int:
        """The number of the CUDA device, counted from 0 over the devices that this process can use."""
        return int(self.name.partition(":")[2])

    def check_kv_dtype(self, kv_dtype: str) -> None:
        """Raise UsageError if K and V cannot be stored as `kv_dtype` on this device."""
        kept = _TORCH_KV_TYPES if self.is_torch else _CPU_KV_TYPES
        if kv_dtype not in kept:
            raise UsageError(f"K/V type {kv_dtype} is not kept on {self.name}: choose one of {', '.join(kept)}")
