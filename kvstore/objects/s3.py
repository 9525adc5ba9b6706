"""A bucket of S3, or of a server that speaks its protocol, by obstore.

Address, region and credentials are obstore's to find, as every S3 client finds them: in the
environment (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), or by the role
of a container or an instance. None of them is ever in our configuration, or in a message.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio
import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from kvass.common.errors import Invalid, Unavailable
from kvass.kvstore.objects.shelf import Listed

if TYPE_CHECKING:
    from obstore.store import ClientConfig

# A block that comes later than this is computed faster. An object has at most 16 MiB, or is one
# block: in 30 s also over a slow line.
CONNECT_S, READ_S, WRITE_S = 2, 5, 30
RETRY_S = 3  # of one call, for what S3 answers at times: slow down, internal error
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
PAGE_OBJECTS = 100  # a name takes some 20 µs to take in, between which the node serves
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")


class S3Bucket:
    """The objects under one address (`s3://bucket/prefix`)."""

    def __init__(self, address: str) -> None:
        """Nothing is asked yet; raises Invalid for what can never work."""
        parts = urlsplit(address)
        options: ClientConfig = {
            "allow_http": _is_plain(),
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "timeout": timedelta(seconds=WRITE_S),
        }
        try:
            self.store = S3Store(
                parts.netloc,
                prefix=parts.path.strip("/") or None,
                client_options=options,
                retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=RETRY_S)},
            )
        except (BaseError, ValueError) as error:
            raise Invalid(f"store.bucket: what AWS_… says: {_reason(str(error))}") from None

    async def put(self, name: str, data: memoryview) -> None:
        with _mapped("put", WRITE_S):
            await obstore.put_async(self.store, name, data, use_multipart=False)

    async def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        try:
            with _mapped("read", READ_S):
                found = await obstore.get_ranges_async(
                    self.store, name, starts=starts, ends=ends, coalesce=0
                )
        except FileNotFoundError:
            return None
        return [memoryview(each) for each in found]

    async def delete(self, names: Sequence[str]) -> None:
        with _mapped("delete", WRITE_S):
            await obstore.delete_async(self.store, list(names))

    async def pages(self, under: str) -> AsyncGenerator[list[Listed], None]:
        pages = obstore.list(self.store, prefix=under, chunk_size=PAGE_OBJECTS)
        while True:
            with _mapped("list", WRITE_S):
                page = await anext(pages, None)
            if page is None:
                return
            now = datetime.now(UTC)
            yield [
                Listed(each["path"], each["size"], (now - each["last_modified"]).total_seconds())
                for each in page
            ]


def _is_plain() -> bool:
    """Whether the environment names an endpoint of plain HTTP: that is how it is asked for. Raises
    Invalid for one that is none."""
    is_plain = False
    for name in ENDPOINTS:
        if value := os.environ.get(name):
            parts = urlsplit(value)
            if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
                raise Invalid(f"{name}: expected http://host:port or https://host, and no secret")
            is_plain |= parts.scheme == "http"
    return is_plain


@contextmanager
def _mapped(what: str, within_s: float) -> Iterator[None]:
    try:
        with anyio.fail_after(within_s):
            yield
    except TimeoutError:
        raise Unavailable(f"bucket: cannot {what}: no answer within {within_s:.0f} s") from None
    except (BaseError, OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and what == "read":
            raise
        raise Unavailable(f"bucket: cannot {what}: {_reason(str(error))}") from None
    except Exception as error:
        # A bug in Rust comes as a class that cannot be imported; it costs the call, not the node.
        if type(error).__name__ != "RustPanic":
            raise
        raise Unavailable(f"bucket: cannot {what}: obstore met a bug: {error}") from error


def _reason(text: str) -> str:
    """Return what a person needs of obstore's message: neither the address it asked nor what the
    server made of the signature."""
    line = text.partition("\n")[0].rpartition(" - ")[2].partition(": <")[0].strip()
    code = _CODE.search(text)
    return f"{line[:200]} ({code[1]})" if code else line[:200]
