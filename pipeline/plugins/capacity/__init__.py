"""Worlds that are larger than the machine: predicted by what was measured on it, or run dry in one process."""
