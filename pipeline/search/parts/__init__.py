"""The searchable parts. No torch at import."""

from pipeline.search.parts import interactions, mlps, widths

__all__ = ["SPECS"]

SPECS = (widths.SPEC, interactions.SPEC, mlps.SPEC)
