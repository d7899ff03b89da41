"""Searches for the most probable answers."""
