"""Launching: the chain of a run's stages, and the schedulers that start them. Imports no torch and no TorchX."""
