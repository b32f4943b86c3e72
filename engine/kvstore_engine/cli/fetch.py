"""`kvengine fetch`: provides a model on this machine, downloaded and converted if needed."""

import argparse

from kvstore_engine.models.locate import locate


def run(options: argparse.Namespace) -> int:
    """Print the model's path; return 0, or raise an error that `main` turns into an exit code."""
    print(locate(options.model, options.quant))
    return 0
