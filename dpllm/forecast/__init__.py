"""What ``dpllm plan`` shows before anything runs: the promise as a table, and the memory that a run will need."""
