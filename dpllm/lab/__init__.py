"""Experiments outside a normal run: shadow models, models trained elsewhere. Only dpllm.cli imports it."""
