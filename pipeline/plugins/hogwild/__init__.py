"""Steps by threads without locks, ``train.mode=hogwild`` (Niu et al., NIPS'11)."""
