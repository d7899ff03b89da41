"""Prefixes that outlive their requests: pinned, or as snapshots in memory and files."""
