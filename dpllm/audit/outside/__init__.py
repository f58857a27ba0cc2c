"""Models and canaries of others."""
