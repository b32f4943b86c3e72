"""Opens a model file with pool, executor and kvstored session, as a `Generator`. The module owns their lifetime and
defaults.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_engine.batching.compute import VerifiedCompute
from kvstore_engine.devices import CPU
from kvstore_engine.errors import UsageError
from kvstore_engine.generate import PREFILL_STEP_TOKENS, Generator
from kvstore_engine.gguf import FileWatch, GGUFFile
from kvstore_engine.models.cache import cache_root
from kvstore_engine.page_selection import PageSelection
from kvstore_engine.profiler import TracingObserver
from kvstore_engine.restore.fingerprint import STORAGE_BLOCK_TOKENS, model_fingerprint
from kvstore_engine.restore.profile import profile_path
from kvstore_engine.restore.session import KvSession
from kvstore_engine.template import ChatTemplate
from kvstore_engine.threads import default_threads
from kvstore_engine.tokenizer import Tokenizer
from kvstore_restore.learned import LearnedCosts

if TYPE_CHECKING:
    from kvstore_client.device import DeviceMemory
    from kvstore_engine.executors import DeviceName, PoolSetup, StepExecutor, StepSizes
    from kvstore_engine.model.config import ModelConfig
    from kvstore_engine.pool import BlockPool
    from kvstore_engine.restore.copies import PoolCopies
    from kvstore_engine.stages.pipeline import Pipeline
    from kvstore_engine.stages.prompts import StagedPrompts
    from kvstore_proto.fingerprint import Fingerprint

DEFAULT_CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options for loading. `context` None: 4096 tokens or the model's limit if smaller. `threads` None:
    `threads.default_threads`.

    `kvstore`: the folder of the daemon's sockets, None to run without it. `device`: a name for `DeviceName.parse`.
    `stages`: with more than one the layers are computed by a pipeline, whose stages have `threads` threads each, one by
    default. Each then restores and stores the K/V of its own layers, and the hidden states that it starts from unless
    `hidden_states` is False. `whole_blocks`: blocks of all layers are restored and stored instead, as without stages.
    `trace`: the file for a trace of the engine's events. `accepts_lossy`: see `kvstore_client.connect(exact=False)`.
    `selection`: the pages that new tokens of the answer read; None: all.
    """

    context: int | None = None
    threads: int | None = None
    kvstore: Path | None = None
    warm_up: bool = True
    device: str = CPU
    stages: int = 1
    whole_blocks: bool = False
    hidden_states: bool = True
    trace: Path | None = None
    accepts_lossy: bool = False
    selection: PageSelection | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An open model as a command needs it: its name, the generator of answers, and the source text of its chat
    template.
    """

    name: str
    generator: Generator
    template_source: GGUFFile

    def chat_template(self) -> ChatTemplate:
        """Return the model's chat template as an object that makes prompts. Raises TemplateError if the model has
        none.
        """
        return ChatTemplate.from_metadata(self.template_source.metadata, self.generator.tokenizer.vocabulary)


@contextlib.contextmanager
def open_model(path: Path, options: LoadOptions) -> Iterator[LoadedModel]:
    """Load the model file `path` and keep it open for the time of a `with` block. Raises GGUFError, UnsupportedModel,
    TokenizerError, GGMLError or UsageError with a message of one line.
    """
    # Imported here: the compute half loads ggml and builds or loads the kernels.
    from kvstore_engine.executors import DeviceName, PoolSetup, StepSizes
    from kvstore_engine.model.config import ModelConfig
    from kvstore_engine.pool import ENGINE_BLOCK_TOKENS, window_pool_blocks

    device = DeviceName.parse(options.device)
    threads = _threads(options)
    with contextlib.ExitStack() as stack:
        observer = TracingObserver(options.trace) if options.trace is not None else None
        if observer is not None:
            stack.callback(observer.close)
        file = GGUFFile.open(path)
        watch = FileWatch(file)
        tokenizer = Tokenizer.from_metadata(file.metadata)
        config = ModelConfig.from_gguf(file)
        context = context_tokens(options.context, config.context_length)
        check_vocabulary(tokenizer, config.vocabulary)
        blocks = -(-context // STORAGE_BLOCK_TOKENS) * STORAGE_BLOCK_TOKENS // ENGINE_BLOCK_TOKENS
        windows = 0
        if device.name == CPU and options.stages == 1:  # the others keep all of each layer
            step = min(PREFILL_STEP_TOKENS, context)
            windows = window_pool_blocks(
                config, blocks, block_tokens=ENGINE_BLOCK_TOKENS, sequences=1, step_tokens=step
            )
        setup = PoolSetup(blocks, ENGINE_BLOCK_TOKENS, "f16", windows, options.selection)
        sizes = StepSizes(threads, PREFILL_STEP_TOKENS, 1, context)
        executor = stack.enter_context(_open_executor(file, device, options.stages, setup, sizes))
        store = stack.enter_context(_open_store(options, watch, tokenizer, executor, device))
        watch.require_untouched()  # since it was opened: some weights are copies
        generator = Generator(
            tokenizer=tokenizer,
            executor=VerifiedCompute(executor, watch.check),
            context=context,
            session=store.session,
            copies=store.copies,
            costs=store.costs,
            stages=store.stages,
            observer=observer,
        )
        stack.callback(generator.close)
        if options.warm_up:
            generator.warm_up()
        yield LoadedModel(executor.config.name, generator, file)


def _threads(options: LoadOptions) -> int:
    """Return the threads of each stage."""
    if options.stages < 1:
        raise UsageError(f"stages must be at least 1, got {options.stages}")
    if options.threads is None:
        return default_threads() if options.stages == 1 else 1
    if options.threads < 1:
        raise UsageError(f"threads must be at least 1, got {options.threads}")
    return options.threads


def _open_executor(
    file: GGUFFile, device: "DeviceName", stages: int, setup: "PoolSetup", sizes: "StepSizes"
) -> "contextlib.AbstractContextManager[StepExecutor | Pipeline]":
    """Open the executor or pipeline, until the block ends."""
    from kvstore_engine.opening import open_executor, open_stages

    if stages == 1:
        return open_executor(file, device, setup, sizes)
    if device.name != CPU:
        raise UsageError(f"stages are computed on {CPU} alone, not on {device.name}")
    if setup.selection is not None:
        raise UsageError("--select-pages goes without --stages: leave out one of them")
    return open_stages(file, stages, setup, sizes)


@dataclass(frozen=True, slots=True)
class _Store:
    """The parts that restore and store: a session and the pool's copies, or the stages', and the costs of computing.
    Without a daemon there is neither.
    """

    session: KvSession | None = None
    copies: "PoolCopies | None" = None
    stages: "StagedPrompts | None" = None
    costs: LearnedCosts = field(default_factory=LearnedCosts)


@contextlib.contextmanager
def _open_store(
    options: LoadOptions,
    watch: FileWatch,
    tokenizer: Tokenizer,
    executor: "StepExecutor | Pipeline",
    device: "DeviceName",
) -> Iterator[_Store]:
    """Yield the sessions with the daemon of `options`, and the costs learned by earlier runs; an empty store without a
    daemon.
    """
    if options.kvstore is None:
        yield _Store()
        return
    # The digest reads all the weights, so it is computed only where it is needed.
    digest, stages = watch.digest().weights, options.stages
    fingerprint = fingerprint_of(watch.file, executor.config, tokenizer, executor.pool, digest, device)
    profile = partial(profile_path, cache_root(), digest, _threads(options) * stages, device.name)
    connect = partial(_connect, options.kvstore, exact=not options.accepts_lossy)
    with contextlib.ExitStack() as stack:
        costs = LearnedCosts.load(profile())
        stack.callback(costs.save, profile())
        if stages > 1 and not options.whole_blocks:
            from kvstore_engine.stages.pipeline import Pipeline
            from kvstore_engine.stages.prompts import open_staged_prompts

            assert isinstance(executor, Pipeline), "several stages are computed by a pipeline"
            profiles = [profile(part=f"stage{number}of{stages}") for number in range(stages)]
            prompts = open_staged_prompts(
                executor, fingerprint, connect, profiles, keeps_inputs=options.hidden_states, check=watch.check
            )
            yield _Store(stages=stack.enter_context(prompts), costs=costs)
        else:
            from kvstore_engine.opening import open_copies

            copies = stack.enter_context(open_copies(executor, device))
            session = connect(fingerprint, device=copies.device)
            stack.callback(session.close)
            yield _Store(session, copies, costs=costs)


def _connect(
    folder: Path,
    fingerprint: "Fingerprint",
    staging_bytes: int | None = None,
    device: "DeviceMemory | None" = None,
    *,
    exact: bool = True,
) -> KvSession:
    """Return a session for this model's state; degraded, not an error, while no daemon answers in `folder`.
    `staging_bytes` None: the client's default. `device`: memory in which leases may be read, beside host memory.
    """
    import kvstore_client
    from kvstore_client.entry import DEFAULT_STAGING_BYTES

    session: KvSession = kvstore_client.connect(
        folder,
        fingerprint=fingerprint,
        client_name="kvengine",
        staging_bytes=DEFAULT_STAGING_BYTES if staging_bytes is None else staging_bytes,
        device=device,
        exact=exact,
    )
    return session


def fingerprint_of(
    file: GGUFFile,
    config: "ModelConfig",
    tokenizer: Tokenizer,
    pool: "BlockPool",
    digest: str,
    device: "DeviceName | None" = None,
) -> "Fingerprint":
    """Return the fingerprint under which blocks of `pool` are stored for the model in `file`, whose weights have the
    digest `digest`. The `device` that computes (None: ggml) is a part of the fingerprint, because results differ
    between devices.
    """
    from kvstore_engine.pool import PAYLOAD_LAYOUT

    return model_fingerprint(
        config,
        weights_digest=digest,
        tokenizer_digest=tokenizer.digest,
        kv_dtype=pool.kv_dtype,
        kv_row_bytes=pool.row_bytes,
        engine_block_tokens=pool.block_tokens,
        layout=PAYLOAD_LAYOUT,
        order_of_sums=_order_of_sums(file, device),
        divided=pool.window is not None,
    )


def _order_of_sums(file: GGUFFile, device: "DeviceName | None") -> str:
    if device is not None and device.is_torch:
        from kvstore_engine.torch_executor import numerics

        return numerics(device)
    from kvstore_engine.model.placement import order_of_sums

    return order_of_sums(file)


def context_tokens(asked: int | None, most: int) -> int:
    """Return the length of the context in tokens: `asked`, or by default 4096, or `most` if that is less. Raises
    UsageError if `asked` is below 2 or above `most`.
    """
    if asked is None:
        return min(DEFAULT_CONTEXT_TOKENS, most)
    if asked < 2:
        raise UsageError(f"the context must hold at least 2 tokens, got {asked}")
    if asked > most:
        raise UsageError(f"a context of {asked} tokens is more than the {most} that this model was trained for")
    return asked


def check_vocabulary(tokenizer: Tokenizer, rows: int) -> None:
    """Raise UsageError if `tokenizer` has more tokens than the model's table of embeddings has `rows`."""
    count = len(tokenizer.vocabulary.tokens)
    if count > rows:
        raise UsageError(f"the file is damaged: {count} tokens but only {rows} rows of embeddings")
