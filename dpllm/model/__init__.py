"""The base model and its trainable part: loading, memory, sharding, evaluation."""
