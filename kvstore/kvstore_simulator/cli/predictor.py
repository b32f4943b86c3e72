"""`kvstored predictor`: train a model of return from recordings, and measure how good predictors are on them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore_console.command_line import Commands, one_of, some_of, whole_number
from kvstored.exits import EXIT_OK, failure, mistake

if TYPE_CHECKING:
    from kvstore_simulator.trace import Trace

_FORMAT = "kvstored"
_QUESTIONS = 60
_EXAMPLES = """\
examples:
  kvstored serve --record /var/lib/kvstored/day.jsonl.gz
  kvstored predictor train day1.jsonl.gz day2.jsonl.gz --out /var/lib/kvstored/return.npz
  kvstored predictor evaluate day3.jsonl.gz --model /var/lib/kvstored/return.npz
"""
_TRAIN = """\
examples:
  kvstored predictor train day1.jsonl.gz day2.jsonl.gz --out return.npz
  kvstored predictor train chat.jsonl.gz --format mooncake --out return.npz --json | jq .held_out

Writes the model and return.card.json (data, features, held-out figures against session-return). Of each recording the
first 60 % of the requests are fitted, the next 15 % choose how many trees are kept, the last 25 % judge.
To use it: prefetch.predictor = "learned", prefetch.model = "/.../return.npz".
Training needs scikit-learn (pip install '.[learned]' in the clone); serving and evaluate do not.
exit status: 0 done; 1 it could not be done; 2 a mistake in the arguments or a recording, or too little to learn from
"""
_EVALUATE = """\
examples:
  kvstored predictor evaluate day3.jsonl.gz --model return.npz
  kvstored predictor evaluate day3.jsonl.gz --predictor session-return,markov,ensemble
  kvstored predictor evaluate chat.jsonl.gz --format mooncake --learn 0.75 --json | jq '.rows[].log_loss'

Each predictor learns as it does live, and is asked at evenly spaced times after the first --learn of the requests.
LOG LOSS (nats) and BRIER: less is better; of the mean: the log loss of one that knows how many come true, and no more.
ECE: how far chances are from what came. Predictors that guess other chains are judged on other guesses.
exit status: 0 done; 2 a mistake in the arguments, the model or a recording
"""


def add_predictor(commands: Commands) -> None:
    predictor = commands.add_parser(
        "predictor",
        help="train a predictor of return from recordings, or judge predictors on them",
        description="Train a model for prefetch.predictor = learned from recordings, or say what predictors foretell.",
        epilog=_EXAMPLES,
    )
    actions = predictor.add_subparsers(title="actions", required=True, metavar="ACTION")
    train = actions.add_parser(
        "train", help="make a model from recordings", description="Make a model from recordings.", epilog=_TRAIN
    )
    train.add_argument("--out", type=Path, required=True, metavar="MODEL.npz", help="where the model is written")
    train.set_defaults(run=_train)
    evaluate = actions.add_parser(
        "evaluate", help="what predictors foretell of recordings",
        description="What predictors foretell of recordings.", epilog=_EVALUATE,
    )  # fmt: skip
    evaluate.add_argument("--predictor", metavar="LIST", help="or all that need no model (default session-return)")
    evaluate.add_argument("--model", type=Path, metavar="MODEL.npz", help="also the learned one with this model")
    evaluate.add_argument("--learn", type=float, default=0.5, metavar="SHARE", help="not judged (default 0.5)")
    evaluate.add_argument(
        "--questions", type=whole_number(1, 10_000), default=_QUESTIONS, metavar="N",
        help="times at which it is asked (default %(default)s)",
    )  # fmt: skip
    evaluate.set_defaults(run=_evaluate)
    for each in (train, evaluate):
        each.add_argument("recording", type=Path, nargs="+", metavar="RECORDING", help="JSON lines, gzip or not")
        each.add_argument(
            "--format", default=_FORMAT, metavar="NAME",
            help="kvstored (default: what serve --record writes), mooncake or claude-code",
        )  # fmt: skip
        each.add_argument("--json", action="store_true", help="one JSON object on one line")


def _train(arguments: argparse.Namespace) -> int:
    from kvstore_console.progress import Progress
    from kvstore_simulator.predictor_card import card, table
    from kvstore_simulator.training import need_scikit_learn, train
    from kvstored.store.prefetch.model_file import write_model

    out: Path = arguments.out
    try:
        need_scikit_learn()
        _check_out(out, arguments.recording)
        with Progress("kvstored predictor") as progress:
            traces = _read(arguments, progress.advance)
            trained = train(traces, progress.advance)
    except ValueError as error:
        return mistake(str(error))
    except (OSError, RuntimeError) as error:
        return failure(str(error))
    facts = card(traces, trained)
    try:
        write_model(out, trained.arrays)
        out.with_suffix(".card.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        return failure(f"cannot write {error.filename or out}: {error.strerror or error}")
    if arguments.json:
        print(json.dumps(facts))
        return EXIT_OK
    trees = facts["trees"]
    print(f"{out}: {trees} trees from {trained.fitted_rows:,} looks at chains" if trees else _no_gain(out))
    print(f"{out.with_suffix('.card.json')}: its card")
    print(f"\nthe last quarter of each recording, which it was not trained with:\n\n{table(facts['held_out'])}")
    return EXIT_OK


def _no_gain(out: Path) -> str:
    return f"{out}: no tree foretold more than session-return did; with this model, learned says nearly what that does"


def _evaluate(arguments: argparse.Namespace) -> int:
    from kvstore_console.progress import Progress
    from kvstore_simulator.judging import judge_all
    from kvstore_simulator.predictor_card import rows_of, table

    try:
        if not 0 <= arguments.learn < 1:
            raise ValueError(f"--learn {arguments.learn:g}: a share of the requests, from 0 to less than 1")
        makers = _makers(arguments)
        with Progress("kvstored predictor") as progress:
            traces = _read(arguments, progress.advance)
            seen = {
                name: judge_all(traces, make, arguments.learn, arguments.questions, progress.advance)
                for name, make in makers.items()
            }
    except ValueError as error:
        return mistake(str(error))
    rows = rows_of(seen)
    if arguments.json:
        recordings = [{"name": trace.name, "requests": trace.requests} for trace in traces]
        print(json.dumps({"recordings": recordings, "learn": arguments.learn, "rows": rows}))
    else:
        print(table(rows))
    return EXIT_OK


def _makers(arguments: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return by name the functions that make the chosen predictors. Raises ValueError with one line."""
    from kvstored.predictor_names import LEARNED, NONE, ON_HINT, PREDICTORS
    from kvstored.store.prefetch.guarded_predictor import create_predictor

    alone = tuple(name for name in PREDICTORS if name not in (NONE, LEARNED))
    text = "session-return" if arguments.predictor is None else arguments.predictor
    learning = tuple(name for name in alone if name != ON_HINT)
    names = some_of("--predictor", text, (*alone, LEARNED), every=learning)
    if LEARNED in names and arguments.model is None:
        raise ValueError("--predictor learned needs --model MODEL.npz: make one with kvstored predictor train")
    makers: dict[str, Callable[[], Any]] = {name: partial(create_predictor, name) for name in names if name != LEARNED}
    if arguments.model is not None:
        from kvstore_predictor.learned import LearnedPredictor
        from kvstored.store.prefetch.model_file import read_model

        makers[LEARNED] = partial(LearnedPredictor, read_model(arguments.model))
    return makers


def _read(arguments: argparse.Namespace, progress: Callable[[str, int, int], None]) -> list[Trace]:
    """Return the traces of the recordings. Raises ValueError (TraceError) with one line."""
    from kvstore_simulator.readers import FORMATS, ReadOptions, read_trace

    name = one_of("--format", arguments.format, FORMATS)
    traces = []
    for path in arguments.recording:
        try:
            trace = read_trace(path, name, ReadOptions(), partial(progress, f"reading {path.name}"))
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
        if trace.lookups == 0:
            raise ValueError(f"{path} has no request that looks anything up")
        traces.append(trace)
    return traces


def _check_out(out: Path, recordings: list[Path]) -> None:
    """Check `out` before the long work begins. Raises ValueError."""
    if out.suffix != ".npz":
        raise ValueError(f"--out {out}: a name that ends in .npz; its card is written beside it")
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(
            f"--out {out}: {'it is a directory' if out.is_dir() else f'there is no directory {out.parent}'}"
        )
    if any(out.exists() and each.exists() and out.samefile(each) for each in recordings):
        raise ValueError(f"--out {out} would overwrite the input")
