"""Measurements, each run with one command: `python -m benchmarks.NAME`."""
