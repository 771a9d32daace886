"""Benchmarks: `python -m monograph.bench NAME`."""
