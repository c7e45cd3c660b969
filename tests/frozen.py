"""The last import of the fork server: what it imported before is shared with its children for good.

The garbage collector writes to every object that it looks at, so its first run in a child would copy all of them: a
half second for each child.
"""

import gc

gc.freeze()
