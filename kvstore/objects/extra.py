"""What a bucket takes besides Kvass: a package that is an extra. It loads nothing."""

from __future__ import annotations

from importlib.util import find_spec

from kvass.common.errors import Invalid


def require_client(address: str) -> None:
    """Raise Invalid when a bucket is named, and the package that reaches it is not installed."""
    if address and find_spec("obstore") is None:
        raise Invalid(
            f"store.bucket is {address!r}, which takes a package that is not installed: "
            "pip install -c constraints.txt -e '.[objects]', in Kvass's folder"
        )
