"""Posts the verdict as JSON, with three tries. The webhook never changes the outcome of a night."""

from __future__ import annotations

import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

TRIES = 3
TIMEOUT_SECONDS = 10.0
PAUSE_SECONDS = 2.0
log = logging.getLogger(__name__)


def deliver(
    url: str, verdict: Mapping[str, Any], *, timeout: float = TIMEOUT_SECONDS, pause: float = PAUSE_SECONDS
) -> bool:
    """POST ``verdict`` to ``url``; returns whether it was accepted. Logs a failure, without the secret part of the URL.

    A redirection is a failure, because the verdict would not be sent along. ``timeout`` and ``pause`` are in seconds;
    the pause doubles after each try.
    """
    opener, problem = urllib.request.build_opener(_NoRedirection), ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            request = urllib.request.Request(
                url,
                data=json.dumps(verdict).encode(),
                method="POST",
                headers={"Content-Type": "application/json", "User-Agent": "nightjar"},
            )
            with opener.open(request, timeout=timeout):
                return True
        except urllib.error.HTTPError as error:
            problem = f"it answered {error.code} {error.reason}"
        except (ValueError, http.client.InvalidURL):  # their messages quote the URL
            log.warning("the verdict was not delivered to nightly.webhook%s: its URL is not valid", _host(url))
            return False
        except (OSError, http.client.HTTPException) as error:
            problem = str(getattr(error, "reason", error)) or type(error).__name__
    log.warning("the verdict was not delivered to nightly.webhook%s in %d tries: %s", _host(url), TRIES, problem)
    return False


def _host(url: str) -> str:
    """`` at <host>`` for messages; "" if the URL names none."""
    try:
        host = urlsplit(url).hostname
    except ValueError:
        return ""
    return f" at {host}" if host else ""


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Treat a redirection as an error."""
