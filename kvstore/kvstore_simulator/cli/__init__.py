"""The commands of `kvstored` that study traces: `simulate` and `predictor`. `kvstored.cli` finds them here by name."""

from __future__ import annotations

from kvstore_console.command_line import Commands
from kvstore_simulator.cli.predictor import add_predictor
from kvstore_simulator.cli.simulate import add_simulate


def add_commands(commands: Commands) -> None:
    """Add the parsers of `kvstored simulate` and `kvstored predictor` to `commands`."""
    add_simulate(commands)
    add_predictor(commands)
