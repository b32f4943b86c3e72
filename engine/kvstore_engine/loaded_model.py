"""Opens a model file with pool, executor and kvstored session, as a `Generator`. Owns their lifetime and defaults."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_client.restore.learned import LearnedCosts
from kvstore_engine.errors import UsageError
from kvstore_engine.generate import PREFILL_STEP_TOKENS, Generator
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.models.cache import cache_root
from kvstore_engine.restore.fingerprint import STORAGE_BLOCK_TOKENS, model_fingerprint
from kvstore_engine.restore.profile import profile_path
from kvstore_engine.restore.session import KvSession
from kvstore_engine.template import ChatTemplate
from kvstore_engine.threads import default_threads
from kvstore_engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvstore_engine.batching.compute import Compute
    from kvstore_engine.model import Model, ModelConfig
    from kvstore_engine.pool import BlockPool
    from kvstore_proto.fingerprint import Fingerprint

DEFAULT_CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """`context` None: 4096 tokens or the model's limit if smaller. `threads` None: `threads.default_threads`.

    `kvstore`: the folder of the daemon's sockets, None to run without it. `stages`: with more than one the layers are
    computed by a pipeline, whose stages have `threads` threads each, one by default.
    """

    context: int | None = None
    threads: int | None = None
    kvstore: Path | None = None
    warm_up: bool = True
    stages: int = 1


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a front end needs: the generator, the chat template, and the model's name."""

    name: str
    generator: Generator
    template_source: GGUFFile

    def chat_template(self) -> ChatTemplate:
        """The model's chat template; TemplateError if it has none."""
        tokenizer = self.generator.tokenizer
        vocabulary = tokenizer.vocabulary
        bos, eos = (
            "" if token_id is None else vocabulary.tokens[token_id]
            for token_id in (vocabulary.bos_id, vocabulary.eos_id)
        )
        return ChatTemplate.from_metadata(self.template_source.metadata, bos, eos)


@contextlib.contextmanager
def open_model(path: Path, options: LoadOptions) -> Iterator[LoadedModel]:
    """Load `path` and keep it until the block ends.

    GGUFError, UnsupportedModel, TokenizerError, GGMLError and UsageError each say in one line what is wrong.
    """
    # Imported here: the compute half loads ggml and builds or loads the kernels.
    from kvstore_engine.model import ModelConfig, load_model
    from kvstore_engine.pool import ENGINE_BLOCK_TOKENS, BlockPool

    threads = _threads(options)
    with contextlib.ExitStack() as stack:
        file = GGUFFile.open(path)
        tokenizer = Tokenizer.from_metadata(file.metadata)
        # How long sequences may become is part of a model's configuration: LongRoPE depends on it.
        context = context_tokens(options.context, ModelConfig.from_gguf(file).context_length)
        model = stack.enter_context(load_model(file, context=context))
        config = model.config
        check_vocabulary(tokenizer, config.vocabulary)
        blocks = -(-context // STORAGE_BLOCK_TOKENS) * STORAGE_BLOCK_TOKENS // ENGINE_BLOCK_TOKENS
        pool = BlockPool(config, blocks)
        executor = _compute(stack, model, pool, options.stages, threads, context)
        session, costs = None, LearnedCosts()
        if options.kvstore is not None:
            # The digest reads all the weights, so it is computed only where it is needed.
            digest = file.weights_digest()
            session = _connect(options.kvstore, model, tokenizer, pool, digest)
            stack.callback(session.close)
            profile = profile_path(cache_root(), digest, threads * options.stages)
            costs = LearnedCosts.load(profile)
            stack.callback(costs.save, profile)
        generator = Generator(
            tokenizer=tokenizer, pool=pool, executor=executor, context=context, session=session, costs=costs
        )
        stack.callback(generator.close)
        if options.warm_up:
            generator.warm_up()
        yield LoadedModel(config.name, generator, file)


def _threads(options: LoadOptions) -> int:
    """Of each stage."""
    if options.stages < 1:
        raise UsageError(f"stages must be at least 1, got {options.stages}")
    if options.threads is None:
        return default_threads() if options.stages == 1 else 1
    if options.threads < 1:
        raise UsageError(f"threads must be at least 1, got {options.threads}")
    return options.threads


def _compute(
    stack: contextlib.ExitStack, model: "Model", pool: "BlockPool", stages: int, threads: int, context: int
) -> "Compute":
    """What computes the steps; `stack` closes it."""
    from kvstore_engine.executor import Executor
    from kvstore_engine.stages import open_pipeline

    if stages > model.config.layers:
        raise UsageError(f"{stages} stages are more than the {model.config.layers} layers of this model")
    make: Callable[..., contextlib.AbstractContextManager[Compute]] = Executor
    if stages > 1:
        make = partial(open_pipeline, stages=stages)
    made = make(
        model,
        pool,
        threads=threads,
        max_tokens_per_step=PREFILL_STEP_TOKENS,
        max_sequences=1,
        max_context=context,
    )
    return stack.enter_context(made)


def _connect(folder: Path, model: "Model", tokenizer: Tokenizer, pool: "BlockPool", digest: str) -> KvSession:
    """A session for this model's state; degraded, not an error, while no daemon answers in `folder`."""
    import kvstore_client

    fingerprint = fingerprint_of(model.file, model.config, tokenizer, pool, digest)
    session: KvSession = kvstore_client.connect(folder, fingerprint=fingerprint, client_name="kvengine")
    return session


def fingerprint_of(
    file: GGUFFile, config: "ModelConfig", tokenizer: Tokenizer, pool: "BlockPool", digest: str
) -> "Fingerprint":
    """The fingerprint under which blocks of `pool` are stored, for the model in `file` with weights of that digest."""
    from kvstore_engine.model import order_of_sums
    from kvstore_engine.pool import PAYLOAD_LAYOUT

    return model_fingerprint(
        config,
        weights_digest=digest,
        tokenizer_digest=tokenizer.digest,
        kv_dtype=pool.kv_dtype,
        kv_row_bytes=pool.row_bytes,
        engine_block_tokens=pool.block_tokens,
        layout=PAYLOAD_LAYOUT,
        order_of_sums=order_of_sums(file),
    )


def context_tokens(asked: int | None, most: int) -> int:
    """The context to use for a model that allows `most` tokens. UsageError if `asked` is out of range."""
    if asked is None:
        return min(DEFAULT_CONTEXT_TOKENS, most)
    if asked < 2:
        raise UsageError(f"the context must hold at least 2 tokens, got {asked}")
    if asked > most:
        raise UsageError(f"a context of {asked} tokens is more than the {most} that this model was trained for")
    return asked


def check_vocabulary(tokenizer: Tokenizer, rows: int) -> None:
    """Embeddings may be padded past the vocabulary, but every token needs a row."""
    count = len(tokenizer.vocabulary.tokens)
    if count > rows:
        raise UsageError(f"the file is damaged: {count} tokens but only {rows} rows of embeddings")
