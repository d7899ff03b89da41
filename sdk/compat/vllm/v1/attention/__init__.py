"""The parts of attention that programs name."""
