"""Outputs of a finished run: export/ on the Hub, merged weights, generated text."""
