"""Sharded embedding tables: built from a dataset's schema, placed by a plan, read and written by row."""
