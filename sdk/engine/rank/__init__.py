"""One rank: plans become tensors, the model runs, logits become tokens."""
