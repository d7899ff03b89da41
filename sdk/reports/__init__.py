"""Reports on a loaded model: kernels, formats, bytes, and why they were chosen."""
