"""``python -m pipeline.cli``, which is ``nightjar``."""

import sys

from pipeline.cli import main

sys.exit(main())
