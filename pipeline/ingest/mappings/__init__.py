"""The id mappings that ``data.sparse_defaults.mapping`` and ``data.sparse.<feature>.mapping`` choose from.

To add one, write a file with an instance of ``IdMapping`` and list it here. Files are light to import: polars and
numpy are imported inside methods.
"""

from pipeline.ingest.mappings.bins import BINS
from pipeline.ingest.mappings.double_hash import DOUBLE_HASH
from pipeline.ingest.mappings.hashed import HASH
from pipeline.ingest.mappings.learned import LEARNED
from pipeline.ingest.mappings.vocab import VOCAB

SPECS = (VOCAB, HASH, DOUBLE_HASH, LEARNED, BINS)
