"""Releases from private data without training: statistics, labels, synthetic rows and their checks."""
