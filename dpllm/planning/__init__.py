"""What ``dpllm plan`` answers before anything runs: the promise, its price, what would refuse it, and what may hurt."""
