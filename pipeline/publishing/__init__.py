"""Versions of a model: written, described, promoted, rolled back, opened to score rows."""
