"""Text: sources, rows, the units whose text it is, tokens on disk."""
