"""`scripts/tiny_model KIND [OUT]`: the command line of the tiny models."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.models import puppet, puppet_model, smollm2, tiny, tiny_model

parser = argparse.ArgumentParser(prog="scripts/tiny_model", description="Make a tiny model with random weights and print its path.")
parser.add_argument("kind", choices=[*tiny.KINDS, "puppet", "all"])
parser.add_argument("out", nargs="?", type=Path, help="where to write it (default: the cache folder)")
arguments = parser.parse_args()
if arguments.kind == "all" and arguments.out:
    parser.error("OUT goes with a single kind")
for kind in tiny.KINDS if arguments.kind == "all" else [arguments.kind]:
    if kind == "puppet":
        print(puppet.build(arguments.out, smollm2()) if arguments.out else puppet_model())
    else:
        print(tiny.build(kind, arguments.out, smollm2()) if arguments.out else tiny_model(kind))
