"""Ollama's API: ``/api/...``, with its names of options, its lines and its errors."""
