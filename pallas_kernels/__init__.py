"""GPU kernels for quantized matrix products: arrays in, arrays out.

Nothing here knows jmoe's types. Importing this package imports neither Triton nor any kernel; import the module you
need, e.g. ``from pallas_kernels import bits``.
"""
