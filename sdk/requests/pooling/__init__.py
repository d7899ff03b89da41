"""Calls that generate nothing: embeddings, scores, ranks and classes."""
