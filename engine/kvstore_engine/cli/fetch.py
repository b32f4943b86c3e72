"""`kvengine fetch`: provides a model on this machine, downloaded and converted if needed."""

import argparse

from kvstore_engine.models.locate import locate
from kvstore_engine.models.terms import agree, ask_on_terminal


def run(options: argparse.Namespace) -> int:
    """Run `kvengine fetch`: download or convert the model that `options` names, print the path of its file and return
    exit code 0. Raises UsageError or OperationError.
    """
    print(locate(options.model, options.quant, agree if options.accept_terms else ask_on_terminal))
    return 0
