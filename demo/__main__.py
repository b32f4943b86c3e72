"""`python -m demo [--json] [--model MODEL] [--keep]`: First light, in five answers, then a predicted turn."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from demo.first_light import DEFAULT_MODEL, FirstLight, prompt_options
from demo.next_turn import SETTINGS, NextTurn
from demo.node import DemoFailedError, Node, prepare
from demo.report import as_json, as_text


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make demo",
        description="One question, answered cold, from DRAM, from NVMe, after kill -9, and past a damaged block; then "
        "the next turn of a conversation, from DRAM because it was predicted.",
    )
    parser.add_argument("--json", action="store_true", help="end with the figures as one JSON object")
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help=f"as for kvengine, such as gemma-3-270m (default: {DEFAULT_MODEL})"
    )
    parser.add_argument("--keep", action="store_true", help="keep the temporary directory, to look into it")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kvstored-demo-"))
    node = Node(directory, ("host.capacity=1GiB", "nvme.capacity=2GiB", "nvme.slab=64MiB"))
    small = Node(directory / "small", SETTINGS)
    try:
        prompt = prompt_options(directory, has_template=prepare(arguments.model))
        result = FirstLight(node, arguments.model, say, prompt=prompt).run()
        node.stop()
        turn = NextTurn(small, directory, arguments.model, say).run(result.answer("cold").ttft_s)
        say(as_text(result, turn))
        if arguments.json:
            print(json.dumps(as_json(result, turn)), flush=True)
    except DemoFailedError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        node.stop()
        small.stop()
        if not arguments.keep:
            shutil.rmtree(directory, ignore_errors=True)
    return 0 if result.good and turn.good else 1


def say(text: str) -> None:
    """Print what the person in front of the screen sees while it runs. On stdout: the JSON line comes last."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
