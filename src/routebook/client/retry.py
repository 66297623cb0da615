"""What is tried again, and when.

Only what surely was not started: a connection that could not be made, and an answer of status 429 or 503, with which
a server says that it did not begin. Once a request has been sent and no answer came, the generation may be running,
and a second one would be another sample; so it is not repeated.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

_FIRST_WAIT = 0.25
_NOT_STARTED = frozenset({429, 503})
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)

Outcome = httpx.Response | httpx.TransportError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often to try again, and how long to wait at most, in seconds."""

    max_retries: int
    max_wait: float

    def wait(self, attempt: int, outcome: Outcome) -> float | None:
        """Seconds to wait before the request is sent again, None if it is not.

        Args:
            attempt: times that it was sent already, at least 1.
            outcome: what came of the last time.
        """
        if attempt > self.max_retries or not is_safe(outcome):
            return None
        asked = _asked_wait(outcome)
        if asked is None:
            # Clients that were turned away together must not come back together.
            longest = min(self.max_wait, _FIRST_WAIT * 2.0 ** (attempt - 1))
            return longest * random.uniform(0.5, 1.0)
        return asked if asked <= self.max_wait else None


def is_safe(outcome: Outcome) -> bool:
    """Whether the request surely was not started."""
    if isinstance(outcome, httpx.Response):
        return outcome.status_code in _NOT_STARTED
    return isinstance(outcome, _NOT_SENT)


def _asked_wait(outcome: Outcome) -> float | None:
    """Seconds that the server asks to wait, by number or by date."""
    if not isinstance(outcome, httpx.Response):
        return None
    text = outcome.headers.get("retry-after", "")
    if text.isdecimal():
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
