"""Benchmarks on a GPU: ``python -m bench linear``."""
