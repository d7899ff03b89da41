"""The engines and their metrics."""
