"""Torch modules of the blocks that make a vector of a sample's events. Importing them loads torch."""
