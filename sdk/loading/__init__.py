"""From options to a running engine, and what would stop a load."""
