"""The recipe: typed sections, parsing, messages."""
