"""Helpers around the hub."""
