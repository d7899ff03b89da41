"""Turns calls into requests of an engine, and returns outputs to any thread or event loop.

``prompts`` reads what callers give, ``pooling`` has the calls that generate nothing, ``driving``
runs the engine; the methods of ``LLM`` that generate, and their answers, are here.
"""
