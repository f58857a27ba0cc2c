"""Text: sources, rows, the units that own them, and tokens on disk."""
