"""Data-parallel replicas: which of them runs a request."""
