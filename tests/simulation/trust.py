"""The credentials that members have in tests which start no processes."""

from __future__ import annotations

from kvass.common.rpc.credentials import Credentials
from kvass.common.secret import Secret

SECRET = "what all members know"
CREDENTIALS = Credentials(Secret(SECRET, "the test"))
