"""Several models from one training, ``train.snapshots`` (Huang et al., ICLR'17; SEERL, arXiv 2001.05209)."""
