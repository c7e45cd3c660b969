"""The verdict to whoever wants to know: one POST of JSON, tried three times. It never changes the outcome."""

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
    url: str,
    verdict: Mapping[str, Any],
    *,
    timeout: float = TIMEOUT_SECONDS,
    pause: float = PAUSE_SECONDS,
) -> bool:
    """POST ``verdict`` to ``url``; whether it was taken. A failure is logged, without the URL's secret part.

    A redirection is a failure: what it leads to would be asked without the verdict. ``timeout`` and ``pause`` (between
    tries, twice as long after each) in seconds.
    """
    opener, problem = urllib.request.build_opener(_NoRedirection), ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            request = urllib.request.Request(
                url, data=json.dumps(verdict).encode(), method="POST",
                headers={"Content-Type": "application/json", "User-Agent": "nightjar"},
            )  # fmt: skip
            with opener.open(request, timeout=timeout):
                return True
        except urllib.error.HTTPError as error:
            problem = f"it answers {error.code} {error.reason}"
        except (ValueError, http.client.InvalidURL):  # their words quote the URL
            log.warning("the verdict was not delivered to nightly.webhook%s: its URL is not valid", _host(url))
            return False
        except (OSError, http.client.HTTPException) as error:
            problem = str(getattr(error, "reason", error)) or type(error).__name__
    log.warning("the verdict was not delivered to nightly.webhook%s in %d tries: %s", _host(url), TRIES, problem)
    return False


def _host(url: str) -> str:
    """Where the webhook is, for people; "" where the URL does not say."""
    try:
        host = urlsplit(url).hostname
    except ValueError:
        return ""
    return f" at {host}" if host else ""


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """None: the answer is an error like any other."""
