"""The offline interface."""
