"""The options of engines, and the engines under their older names."""
