"""Turns options into a running engine, and checks what would stop a load."""
