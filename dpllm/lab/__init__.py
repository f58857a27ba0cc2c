"""Experiments outside a normal run: shadow models, models trained elsewhere, gradient leakage. Only dpllm.cli imports it."""
