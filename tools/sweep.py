#!/usr/bin/env python3
"""Plans many combinations of clusters, models and batches: the same as ``hetero sweep``.

python tools/sweep.py quick --out /tmp/quick
"""

import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

from hetero.cli import main

if __name__ == "__main__":
    sys.exit(main(["sweep", *sys.argv[1:]]))
