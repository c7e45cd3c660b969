"""Where ranks of one machine meet: a store on the loopback alone.

A store of torch listens on all interfaces, whatever address it is given, and asks nobody who they are. That gloo and
NCCL listen there too is ``machine.loopback_environment``.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


def loopback_store() -> TCPStore:
    """Serve a store on a port of the loopback, which it holds from the start: no other program can take it."""
    from torch.distributed import TCPStore

    own = socket.create_server((LOOPBACK, 0), backlog=1024)
    port = own.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=own.detach())
