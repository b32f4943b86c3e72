"""`kvengine fetch`: a model on this machine, downloaded and converted where it has to be."""

import argparse

from kvstore_engine.models.locate import locate


def run(options: argparse.Namespace) -> int:
    """Print the model's path; 0, or an error that `main` turns into an exit code."""
    print(locate(options.model, options.quant))
    return 0
