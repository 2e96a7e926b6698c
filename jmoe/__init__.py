"""Quantized linear layers and Mixture-of-Experts for JAX and Flax on GPUs."""
