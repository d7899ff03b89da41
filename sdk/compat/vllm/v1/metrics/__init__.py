"""Metrics of an engine as objects."""
