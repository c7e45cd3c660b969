"""Nightjar: nightly retraining of recommendation and ads-ranking models on TorchRec.

Comments call each package in here a *room*. The way in is a run's stages (``stages/``), each of which calls its rooms.
"""

__version__ = "0.1.0"
