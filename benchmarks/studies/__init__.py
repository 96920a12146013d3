"""Studies: single benchmarks behind a decision record or a figure of the documentation."""
