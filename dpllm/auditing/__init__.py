"""What is asked of a finished run: scores, attacks, extraction, bounds, verdict, report."""
