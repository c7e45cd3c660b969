"""``nightjar demo``: nights on logs of its own, one of them with a bad day."""
