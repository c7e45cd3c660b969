"""Nightjar: nightly retraining of recommendation and ads-ranking models on TorchRec."""

__version__ = "0.1.0"
