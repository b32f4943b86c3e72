"""`kvengine fetch`: provides a model on this machine, downloaded and converted if needed."""

import argparse

from kvstore_engine.models.locate import locate
from kvstore_engine.models.terms import agree, ask_on_terminal


def run(options: argparse.Namespace) -> int:
    """Print the model's path; return 0, or raise an error that `main` turns into an exit code."""
    print(locate(options.model, options.quant, agree if options.accept_terms else ask_on_terminal))
    return 0
