"""Checkpoints: reading, translating and writing quantized models on disk."""
