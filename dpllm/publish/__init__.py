"""What users make from a finished run: export/ on the Hub, merged weights, generated text, synthetic data sets."""
