"""Turns calls into requests of an engine, and returns outputs to any thread or event loop."""
