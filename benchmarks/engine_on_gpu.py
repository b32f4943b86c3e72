"""Decode of 1, 16 and 64 sequences by our engine on torch, against Transformers' `generate` and a loop by hand.

SmolLM2-135M (where `kvengine fetch smollm2-135m-instruct` has put it; else its shape with random weights) and 16 layers
of the shape of Llama 3.2 1B, random, in bf16: K and V too. Prompts of equal length, greedy; a figure is tokens a second
of the steps in which all sequences decode, each step's tokens handed to the host. `generate` has its dynamic cache and,
on a GPU, a static one, for which it compiles the model; the better counts. The loop attends by torch's scaled dot
product attention to K and V that lie together, a CUDA graph for each step. Sides whose tokens are none that a model of
these weights would choose fail the run. `make gpu-check` asks the same (`engine-decode`, `engine-decode-1b`).

With --quick the models are SmolLM2 and a small one, with few steps of at most four sequences, so that a processor can
do it: it shows that the sides agree and measures nothing.

    python benchmarks/engine_on_gpu.py [--device cuda|cpu] [--json] [--quick]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from support.decode_comparison import decode_of_engine
from support.decode_models import ONE_BILLION, SMALL_MODEL, SMOLLM2_135M
from support.gpu_answers import FULL

_QUICK = replace(FULL, decodes=(1, 4), prompt=8, decoded=3)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", metavar="NAME", help="cuda, cuda:N or cpu (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print a JSON list with the figures by name")
    parser.add_argument("--quick", action="store_true", help="a small model in the place of the large, few steps")
    options = parser.parse_args(arguments)
    device = "torch:cpu" if options.device == "cpu" else options.device
    answers = []
    for subject in (SMOLLM2_135M, SMALL_MODEL if options.quick else ONE_BILLION):
        answer = decode_of_engine(device, _QUICK if options.quick else FULL, subject)
        answers.append({"model": subject.name, "holds": answer.holds, "says": answer.says, "figures": answer.figures})
        if not options.json:
            print(answer.says, flush=True)
    if options.json:
        print(json.dumps(answers))
    return 1 if any(answer["holds"] is False for answer in answers) else 0


if __name__ == "__main__":
    sys.exit(main())
