"""Runs one engine for callers on any thread or event loop: the driver, waiting, numbers."""
