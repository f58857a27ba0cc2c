"""Attacks that let a model write or choose."""
