"""Hypothesis without its clock: on a shared machine a slow example is not a fault."""

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
