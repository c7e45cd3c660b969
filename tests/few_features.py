"""Overrides that leave six sparse and three dense features of synthetic logs, with which all work shrinks."""

FEW = [
    *(f"~data.sparse.C{number}" for number in range(7, 27)),
    *(f"~data.dense.I{number}" for number in range(4, 14)),
]
