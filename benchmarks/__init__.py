"""Benchmarks: ratios measured in one run on one machine. `make bench` runs them all and prints a table."""
