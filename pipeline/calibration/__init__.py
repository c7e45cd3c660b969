"""``nightjar calibrate``: this machine's figures, measured through the real kernels and the real training step."""
