"""API keys."""

import hmac
from collections.abc import Sequence
from typing import Final

from services.errors import UnauthenticatedError

PROBE_PATHS: Final = frozenset({"/health", "/ready", "/metrics", "/version"})
"""Routes for probes and scrapers, which have no key."""
_SCHEME: Final = "bearer "


class ApiKeys:
    """The keys that open the API.

    Args:
        keys: none: the API is open.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = tuple(key.encode() for key in keys)

    def check(self, authorization: str | None) -> None:
        """Checks an `Authorization: Bearer <key>` value, in time that does not tell how near it is.

        Errors: UnauthenticatedError.
        """
        if not self._keys:
            return
        value = authorization or ""
        if value[: len(_SCHEME)].lower() != _SCHEME:
            raise UnauthenticatedError("You did not provide an API key.")
        given = value[len(_SCHEME) :].strip().encode(errors="surrogateescape")
        # all are compared, so that the time does not tell which one matched
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(matches):
            raise UnauthenticatedError("Incorrect API key provided.")
