"""Where ranks of one machine meet: a store, and gloo, on the loopback alone.

A store of torch listens on all interfaces, whatever address it is given, and asks nobody who they are.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
_GLOO = "GLOO_SOCKET_IFNAME"  # gloo's variable; without it, gloo listens where the machine's name leads


def loopback_store() -> TCPStore:
    """Serve a store on a port of the loopback, which it holds from the start: no other program can take it."""
    from torch.distributed import TCPStore

    own = socket.create_server((LOOPBACK, 0), backlog=1024)
    port = own.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=own.detach())


def loopback_environment() -> dict[str, str]:
    """The variables by which gloo listens on the loopback alone; none where the user has set them."""
    name = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
    return {} if not name or _GLOO in os.environ else {_GLOO: name}
