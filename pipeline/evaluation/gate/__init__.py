"""The gate: PASS or HOLD for a candidate model beside the incumbent. ``gate.py`` is where to read on."""
