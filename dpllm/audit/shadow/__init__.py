"""Shadow runs: the same recipe with other coins."""
