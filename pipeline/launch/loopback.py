"""Where ranks of one machine meet: a store on the loopback alone.

A store of torch listens on all interfaces, whatever address it is given, and asks nobody who they are. Gloo and NCCL
listen there too by the variables of ``machine.loopback_variables``.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from pipeline.machine import loopback_variables

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


def loopback_store() -> TCPStore:
    """Serve a store on a port of the loopback, which it holds from the start: no other program can take it."""
    from torch.distributed import TCPStore

    own = socket.create_server((LOOPBACK, 0), backlog=1024)
    port = own.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=own.detach())


def loopback_environment() -> dict[str, str]:
    """The variables by which gloo and NCCL of a rank listen on the loopback alone, without those the user has set."""
    return {name: value for name, value in loopback_variables().items() if name not in os.environ}
