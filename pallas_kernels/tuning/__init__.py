"""Tile sizes: heuristics, pure functions of shapes and device facts."""
