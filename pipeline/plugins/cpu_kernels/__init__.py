"""Kernels for CPUs in C, which ``core/kernels.py`` finds by name."""
