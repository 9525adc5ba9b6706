"""How large a log is and its files are. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvass.common.errors import Invalid
from kvass.kvstore.flash.appender import BUFFER_BYTES
from kvass.kvstore.flash.disk import FILES_MAX, PAGE
from kvass.kvstore.flash.files import SEGMENTS_MIN

SEGMENT_MIN = 4 * PAGE  # its head, a record, its index
SEGMENT_MAX = 1 << 30  # one that was not sealed is read whole at a start


@dataclass(frozen=True, slots=True)
class LogSettings:
    """All in bytes, but for `files_max`: how many files may be open at once."""

    flash_bytes: int
    segment_bytes: int
    unsynced_bytes: int
    buffer_bytes: int = BUFFER_BYTES
    files_max: int = FILES_MAX

    def __post_init__(self) -> None:
        size = self.segment_bytes
        if size % PAGE or not SEGMENT_MIN <= size <= SEGMENT_MAX:
            raise Invalid(
                f"store.flash_segment_bytes is {size}; expected {SEGMENT_MIN} to {SEGMENT_MAX}, in "
                f"whole pages of {PAGE}"
            )
        least = SEGMENTS_MIN * size
        if self.flash_bytes < least:
            fits = self.flash_bytes // SEGMENTS_MIN // PAGE * PAGE
            or_less = f", or store.flash_segment_bytes to {fits}" if fits >= SEGMENT_MIN else ""
            raise Invalid(
                f"store.flash_bytes is {self.flash_bytes}, and holds fewer than {SEGMENTS_MIN} "
                f"files of store.flash_segment_bytes ({size}): set store.flash_bytes to {least} or "
                f"more{or_less}"
            )
