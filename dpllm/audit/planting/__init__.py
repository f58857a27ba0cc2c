"""What canaries are made of."""
