"""Benchmarks on a GPU: ``python -m bench moe``, ``linear`` or ``tiles``."""
