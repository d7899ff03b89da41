"""The cache of packed weights: files of the user's cache folder that processes share."""
