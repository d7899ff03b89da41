"""Engines in several processes: ranks, replicas, handing prompts over, and Ray."""
