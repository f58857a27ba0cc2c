"""dpllm: fine-tune causal language models with differential privacy, audit them, publish the card."""

__version__ = "0.1.0"
