"""Quantised incremental checkpoints: rows by (table, global row), committed last, read by any world size."""
