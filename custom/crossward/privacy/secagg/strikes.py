"""How often the server broke the protocol in a job, as one site counts it."""

from __future__ import annotations

MOST = 3


class Strikes:
    """Belongs to the job at a site and not to its keys: whoever asks for new keys does not begin to count anew.

    A strike is a message that nobody waits for, and one in a sum that only the server can have made wrong: what other
    sites signed, it has checked like this site does. What another site sealed is none, because the server cannot look
    into it: a site that lies would otherwise drive an honest one out of the job with three boxes. Nor is a roster that
    does not hold, where a certificate or a clock may be at fault: its keys have protected nothing yet.
    """

    def __init__(self) -> None:
        self._count = 0

    def add(self) -> None:
        self._count += 1

    @property
    def out(self) -> bool:
        """Whether the site has left the job."""
        return self._count >= MOST
