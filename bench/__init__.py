"""Benchmarks: `make bench-NAME` runs bench/NAME.py, which writes results/NAME.json and a table."""
