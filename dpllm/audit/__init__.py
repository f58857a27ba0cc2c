"""The audit: canaries planted before training, and what the finished model gives away about them."""
