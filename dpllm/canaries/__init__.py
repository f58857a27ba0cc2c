"""What is planted before training, drawn from public things alone."""
