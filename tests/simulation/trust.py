"""The credentials that members have in tests which start no processes."""

from __future__ import annotations

from kvass.common.rpc.credentials import Credentials
from kvass.common.secret import Secret

CREDENTIALS = Credentials(Secret("what all members know", "the test"))
