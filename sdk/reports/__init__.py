"""What runs where and why: kernels, formats, bytes."""
