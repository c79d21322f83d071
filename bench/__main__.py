"""`python -m bench NAME ...`: one measurement by name."""

from __future__ import annotations

import importlib
import logging
import sys

from engine.openmp import choose_waiting

NAMES = ("cache_scale", "hostile", "labelled", "models", "neighbour", "observing", "overhead", "soak", "stall")


def main() -> int:
    choose_waiting()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print(f"usage: python -m bench {{{','.join(NAMES)}}} ...", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"bench.{sys.argv[1]}").main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
