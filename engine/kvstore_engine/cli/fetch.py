"""`kvengine fetch`: provides a model on this machine, downloaded and converted if needed."""

import argparse

from kvstore_engine.models.locate import locate
from kvstore_engine.models.terms import agree, ask_on_terminal


def run(options: argparse.Namespace) -> int:
    """Run `kvengine fetch`: print the path of the model file and return exit code 0. Raises an error that `main` turns
    into another code.
    """
    print(locate(options.model, options.quant, agree if options.accept_terms else ask_on_terminal))
    return 0
