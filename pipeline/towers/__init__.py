"""Disaggregated multi-tower training (DMT, MLSys'24): features by tower, and towers on hosts."""
