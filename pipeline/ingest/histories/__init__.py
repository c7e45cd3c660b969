"""Histories that a log does not have: of every row, what its user did before, from the log and the days before."""
