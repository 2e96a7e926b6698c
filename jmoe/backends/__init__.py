"""Implementations of the operations, and the selector that chooses among them."""
