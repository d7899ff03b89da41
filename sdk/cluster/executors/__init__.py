"""Runs the ranks of one engine in other processes, on this host or on others."""
