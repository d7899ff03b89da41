"""What a search returns."""
