"""What a run will need and what may hurt: memory and advice for ``dpllm plan``, before anything runs."""
