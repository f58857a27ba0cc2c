"""The base model and what of it trains: loading, memory, sharding, evaluation."""
