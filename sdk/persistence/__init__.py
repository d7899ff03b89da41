"""Prefixes that are kept after their requests: pinned, or as snapshots in memory and files."""
