"""`python -m monograph.distributed MODEL --ranks N`: a plan by formula; docs/explain/scale.md."""

import importlib
import sys

# By name: commands stand above this room.
sys.exit(importlib.import_module("monograph.cli.plan_ranks").main(sys.argv[1:]))
