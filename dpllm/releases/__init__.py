"""What spends budget or reads private rows, and trains nothing."""
