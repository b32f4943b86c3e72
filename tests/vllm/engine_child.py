"""A vLLM engine in a process of its own, driven over its standard input: one JSON line in, one out.

Started by `engine_process`, with the Python of the vLLM environment, in a session of its own. The first line
describes the engine (`one_process`: scheduler and worker are in this process too); each later one is a request
`{"prompts": [[token ids]], "max_tokens": n}`; the answer to it has the token ids, what was cached, how it ended, and
the wall time of the call. A request's `images` are files, one a prompt; `encoded` and `restored` of an answer count
images since the engine started. Or it is `{"reset_connector": b}`: forget vLLM's own cached blocks. What vLLM prints
goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    os.setsid()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    spec = json.loads(sys.stdin.readline())
    if (pool_gib := spec.pop("pool_gib", 2)) is not None:  # on CPUs it counts, not `kv_cache_memory_bytes`
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(pool_gib))
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if spec.pop("one_process", False):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    if spec.pop("cuts_latent", False):
        _cut_latent_attention()
    transfer = spec.pop("transfer", None)
    if transfer is not None:
        spec["kv_transfer_config"] = KVTransferConfig(
            **{
                "kv_connector": "KVStoreConnector",
                "kv_connector_module_path": "kvstore_connectors.vllm",
                "kv_role": "kv_both",
                **transfer,
            }
        )
    images = {"encoded": 0, "restored": 0}
    encoder = spec.pop("encoder_transfer", None)
    if encoder is not None:
        spec["ec_transfer_config"] = _encoder_transfer(encoder, images)
    llm = LLM(**{"enforce_eager": True, "disable_log_stats": False, **spec})
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        if "reset_connector" in request:
            print(json.dumps({"reset": bool(llm.reset_prefix_cache(**request))}), file=answers)
            continue
        sampling = SamplingParams(
            temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, **request.get("sampling", {})
        )
        prompts = _prompts(request)
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        wall_s = time.perf_counter() - started
        answer = {
            "wall_s": wall_s,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "logprobs": [_logprobs(output.outputs[0]) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "finish": [output.outputs[0].finish_reason for output in outputs],
            "ttft_s": [_ttft_s(output) for output in outputs],
            "preemptions": _preemptions(llm),
            **images,
        }
        print(json.dumps(answer), file=answers)
    shut_down = getattr(llm.llm_engine.engine_core, "shutdown", None)
    if shut_down is not None:
        shut_down()


def _encoder_transfer(settings: dict[str, Any], images: dict[str, int]) -> Any:
    """Return vLLM's settings of our connector for encoder outputs, whose calls on the worker's side are counted in
    `images`, if it runs in this process.
    """
    from vllm.config import ECTransferConfig

    from kvstore_connectors.vllm import KVStoreECConnector

    class Counting(KVStoreECConnector):  # type: ignore[misc]  # a class of vLLM's
        def start_load_caches(self, encoder_cache: Any, **kwargs: Any) -> None:
            images["restored"] += len(self._get_connector_metadata().loads.keys() - encoder_cache.keys())
            super().start_load_caches(encoder_cache, **kwargs)

        def save_caches(self, encoder_cache: Any, mm_hash: str, **kwargs: Any) -> None:
            images["encoded"] += 1
            super().save_caches(encoder_cache, mm_hash, **kwargs)

    sys.modules[__name__].Counting = Counting  # type: ignore[attr-defined]
    usual = {"ec_connector": "Counting", "ec_connector_module_path": __name__, "ec_role": "ec_both"}
    return ECTransferConfig(**{**usual, **settings})


def _prompts(request: dict[str, Any]) -> list[Any]:
    fields = request.get("prompt_fields", {})
    prompts: list[Any] = [{"prompt_token_ids": prompt, **fields} for prompt in request["prompts"]]
    for prompt, file in zip(prompts, request.get("images", ()), strict=False):
        prompt["multi_modal_data"] = {"image": _image(file)}
    return prompts


def _image(file: str) -> Any:
    from PIL import Image

    with Image.open(file) as image:
        return image.convert("RGB")


def _cut_latent_attention() -> None:
    """Let vLLM cut prompts, and have a prefix cache, with latent attention on CPUs without AMX too: it turns both off,
    though its kernels go on behind cached tokens.
    """
    from vllm.platforms.cpu import CpuPlatform

    refused = CpuPlatform.check_and_update_config.__func__

    def kept(kind: Any, config: Any) -> None:
        step_tokens = config.scheduler_config.max_num_batched_tokens
        refused(kind, config)
        config.scheduler_config.max_num_batched_tokens = step_tokens
        config.scheduler_config.enable_chunked_prefill = config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = classmethod(kept)


def _logprobs(completion: Any) -> list[float]:
    """Return the log probabilities of the answer's tokens; [] unless the request asked for them."""
    found = zip(completion.token_ids, completion.logprobs or (), strict=False)
    return [float(of_place[token].logprob) for token, of_place in found]


def _preemptions(llm: Any) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def _ttft_s(output: Any) -> float | None:
    metrics = output.metrics
    return None if metrics is None else getattr(metrics, "first_token_latency", None)


if __name__ == "__main__":
    main()
