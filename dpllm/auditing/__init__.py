"""The audit of a finished run: scores, attacks, extraction, bounds, verdict, report."""
