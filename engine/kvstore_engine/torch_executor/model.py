"""A model in torch: its weights as bf16 tensors on a device, and a decoder's forward step: embedding, layers, head.

The module owns the tensors, made from the matrices of a GGUF file of any type that ggml reads. `kvstore_engine.model`
has the configuration, the list of a layer's parts and the checks, as for ggml. Matrices that multiply equal rows are
joined, as in phi3's files: q, k and v; gate and up. Vectors stay float32, and so does the output matrix on a processor,
where bf16 products cannot give float32.

The step has the order of operations of `graph.decoder`, and the differences between architectures are the data in
`model.architecture`. Products are of bf16; the residual stream, norms and logits are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_console.progress import Progress
from kvstore_engine.devices import DeviceName
from kvstore_engine.errors import UsageError
from kvstore_engine.ggml import load_library
from kvstore_engine.ggml.tensor_values import dequantised
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.quantisation import check_quantisation
from kvstore_engine.model.tensors import check_tensors
from kvstore_engine.torch_executor.attention import AttentionBackend, StepRows
from kvstore_engine.torch_executor.library import free_bytes, torch_library

_QKV, _GATE_UP = ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up")
_SLICE_BYTES = 64 << 20  # of floats at a time: a large matrix is not held in float32 as a whole


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """The weight of one matrix product, [outputs, inputs], and its bias or None, as torch tensors."""

    weight: Any
    bias: Any = None


@dataclass(frozen=True, slots=True)
class TorchLayer:
    """The weights of one transformer layer. Norms are float32 vectors, or None if the architecture has no such norm."""

    attn_norm: Any
    qkv: TorchLinear
    attn_q_norm: Any
    attn_k_norm: Any
    attn_output: TorchLinear
    post_attention_norm: Any
    ffn_norm: Any
    gate_up: TorchLinear
    ffn_down: TorchLinear
    post_ffw_norm: Any


class TorchModel:
    """A model's configuration and weights on `device`, read from `file`, which this object closes. `context` is the
    longest context in tokens.
    """

    def __init__(self, file: GGUFFile, device: DeviceName, context: int) -> None:
        """Load the weights. Raises UnsupportedModel if the model cannot run, UsageError if the weights do not fit the
        device's memory.
        """
        self.file = file
        self.config = config = ModelConfig.from_gguf(file, context)
        self.device = device
        self._torch, self._ggml = torch_library(), load_library()
        check_tensors(file, config)
        check_quantisation(file, self._ggml)
        self._check_memory()
        self._loaded = 0
        with Progress(f"loading {config.name}") as self._progress:
            self.token_embedding = self._matrix("token_embd")
            name = "token_embd" if config.tied_embeddings else "output"
            if device.is_cuda:
                weight = self.token_embedding if config.tied_embeddings else self._matrix(name)
            else:
                weight = self._matrix(name, self._torch.float32)
            self.output = TorchLinear(weight, self._vector("output.bias"))
            self.output_norm = self._vector("output_norm.weight")
            self.rope_factors = self._floats(config.rope.factors) if config.rope.factors else None
            self.layers = tuple(self._layer(f"blk.{index}.") for index in range(config.layers))
        file.release()

    def close(self) -> None:
        """Free the memory of the weights and close the model's file. No executor may use the model afterwards."""
        self.layers, self.token_embedding, self.output = (), None, TorchLinear(None)
        self.file.close()

    def _layer(self, prefix: str) -> TorchLayer:
        def vector(name: str) -> Any:
            return self._vector(f"{prefix}{name}.weight")

        return TorchLayer(
            attn_norm=vector("attn_norm"),
            qkv=self._joined(prefix, "attn_qkv", _QKV),
            attn_q_norm=vector("attn_q_norm"),
            attn_k_norm=vector("attn_k_norm"),
            attn_output=self._joined(prefix, "attn_output"),
            post_attention_norm=vector("post_attention_norm"),
            ffn_norm=vector("ffn_norm"),
            gate_up=self._joined(prefix, "ffn_up", _GATE_UP if f"{prefix}ffn_gate.weight" in self.file.tensors else ()),
            ffn_down=self._joined(prefix, "ffn_down"),
            post_ffw_norm=vector("post_ffw_norm"),
        )

    def _joined(self, prefix: str, joint: str, parts: tuple[str, ...] = ()) -> TorchLinear:
        """Return the joined matrix: `joint` alone if the file has it joined, or has no parts."""
        if f"{prefix}{parts[0] if parts else joint}.weight" not in self.file.tensors:
            parts = ()
        names = [prefix + name for name in parts or (joint,)]
        weight = self._torch.cat([self._matrix(name) for name in names]) if parts else self._matrix(names[0])
        biases = [self._vector(f"{name}.bias") for name in names]
        if all(bias is None for bias in biases):
            return TorchLinear(weight)
        rows = [self.file.tensors[f"{name}.weight"].shape[1] for name in names]
        filled = [
            self._torch.zeros(count, device=weight.device) if bias is None else bias
            for bias, count in zip(biases, rows, strict=True)
        ]
        return TorchLinear(weight, self._torch.cat(filled).to(weight.dtype))

    def _matrix(self, name: str, dtype: Any = None) -> Any:
        info = self.file.tensors[f"{name}.weight"]
        columns, rows = info.shape
        raw = self.file.tensor_bytes(info.name).reshape(rows, -1)
        torch = self._torch
        matrix = torch.empty((rows, columns), dtype=dtype or torch.bfloat16, device=self.device.torch_name)
        step = max(1, _SLICE_BYTES // (4 * columns))
        for first in range(0, rows, step):
            piece = np.ascontiguousarray(raw[first : first + step]).reshape(-1)
            values = dequantised(self._ggml, info.ggml_type, piece)
            matrix[first : first + step].copy_(torch.tensor(values).view(-1, columns))
        self._loaded += 1
        self._progress.advance("weights", self._loaded, 7 * self.config.layers + 2)
        return matrix

    def _floats(self, name: str) -> npt.NDArray[np.float32]:
        """Return a copy as float32: nothing reads the file once it is loaded."""
        return self.file.tensor_bytes(name).view(np.float32).copy()

    def _vector(self, name: str) -> Any:
        """Return float32 on the device, None if the file has none."""
        if name not in self.file.tensors:
            return None
        return self._torch.tensor(self._floats(name), device=self.device.torch_name)

    def _check_memory(self) -> None:
        needed, free = weight_bytes(self.file, self.config, self.device), free_bytes(self.device)
        if needed > free:
            raise UsageError(
                f"the weights take {needed >> 20} MiB as bf16, and {self.device.name} has {free >> 20} MiB free"
            )


def weight_bytes(file: GGUFFile, config: ModelConfig, device: DeviceName) -> int:
    """Return the number of bytes that the weights of `file` take on `device`."""
    elements = sum(int(np.prod(info.shape)) for info in file.tensors.values())
    output = config.width * (config.vocabulary + config.padding)
    if device.is_cuda:
        return 2 * elements
    return 2 * elements + (4 * output if config.tied_embeddings else 2 * output)


class Decoder:
    """A function object for the forward pass of `model`, with `attention` over the K/V pool. It reads no values of
    tensors on the host, so that a step can be recorded and replayed.
    """

    def __init__(self, model: TorchModel, attention: AttentionBackend) -> None:
        self._model, self._attention, self._torch = model, attention, torch_library()
        self._functional = self._torch.nn.functional

    def step(self, tokens: Any, rows: StepRows, outputs: Any = None, *, wants_logits: bool = True) -> Any:
        """Compute one step of `tokens`, int32 [rows], and write K and V. Return the logits, float32 [outputs,
        vocabulary], of the rows whose numbers are in the integer tensor `outputs`; None means all rows. Without
        `wants_logits` None is returned.
        """
        model, config = self._model, self._model.config
        hidden = self._functional.embedding(tokens, model.token_embedding).float()
        if config.family.scaled_embedding:
            hidden = hidden * config.width**0.5
        last = config.layers - 1
        for index, layer in enumerate(model.layers):
            queries = self._write_cache(index, layer, hidden, rows)
            if index == last:
                if not wants_logits:
                    return None
                if outputs is not None:
                    hidden, queries, rows = hidden[outputs], queries[outputs], rows.select(outputs)
            hidden = self._layer(index, layer, hidden, queries, rows)
        return self._logits(self._norm(hidden, model.output_norm))

    def _write_cache(self, index: int, layer: TorchLayer, hidden: Any, rows: StepRows) -> Any:
        """Write the layer's K and V to the cache, and return its rotated queries."""
        config = self._model.config
        fused = self._linear(layer.qkv, self._norm(hidden, layer.attn_norm))
        heads = fused.view(rows.count, config.heads + 2 * config.kv_heads, config.head_dim)
        queries, keys, values = heads.split((config.heads, config.kv_heads, config.kv_heads), 1)
        if layer.attn_q_norm is not None:
            queries = self._norm(queries.float(), layer.attn_q_norm)
        if layer.attn_k_norm is not None:
            keys = self._norm(keys.float(), layer.attn_k_norm)
        return self._attention.write(index, queries, keys, values, rows)

    def _layer(self, index: int, layer: TorchLayer, hidden: Any, queries: Any, rows: StepRows) -> Any:
        attended = self._attention.attend(index, queries, rows).view(rows.count, -1)
        hidden = hidden + self._branch(self._linear(layer.attn_output, attended), layer.post_attention_norm)
        gate, up = self._linear(layer.gate_up, self._norm(hidden, layer.ffn_norm)).chunk(2, -1)
        if self._model.config.family.activation == "geglu":
            gated = self._functional.gelu(gate, approximate="tanh") * up
        else:
            gated = self._functional.silu(gate) * up
        return hidden + self._branch(self._linear(layer.ffn_down, gated), layer.post_ffw_norm)

    def _branch(self, values: Any, norm: Any) -> Any:
        """Return the addend of the residual stream, float32."""
        values = values.float()
        return values if norm is None else self._normed(values, norm)

    def _norm(self, values: Any, weight: Any) -> Any:
        """Return RMSNorm of float32, as bf16."""
        return self._normed(values, weight).to(self._torch.bfloat16)

    def _normed(self, values: Any, weight: Any) -> Any:
        return self._functional.rms_norm(values, weight.shape, weight, self._model.config.rms_epsilon)

    def _linear(self, linear: TorchLinear, rows: Any) -> Any:
        return self._functional.linear(rows, linear.weight, linear.bias)

    def _logits(self, rows: Any) -> Any:
        torch, output = self._torch, self._model.output
        if output.weight.dtype == torch.float32:
            logits = rows.float() @ output.weight.t()
        else:
            logits = torch.mm(rows, output.weight.t(), out_dtype=torch.float32)
        if output.bias is not None:
            logits = logits + output.bias
        logits = logits[:, : self._model.config.vocabulary]
        cap = self._model.config.output_softcap
        return cap * torch.tanh(logits / cap) if cap else logits
