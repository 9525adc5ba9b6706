"""How large a log is and its files are. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvass.common.errors import Invalid
from kvass.kvstore.flash.appender import BUFFER_BYTES
from kvass.kvstore.flash.disk import FILES_MAX, PAGE
from kvass.kvstore.flash.files import SEGMENTS_MIN

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
        if size % PAGE or not 4 * PAGE <= size <= SEGMENT_MAX:
            raise Invalid(
                f"flash: segments of {size} bytes; expected whole pages of {PAGE}, up to "
                f"{SEGMENT_MAX}"
            )
        if self.flash_bytes < SEGMENTS_MIN * size:
            raise Invalid(
                f"flash: {self.flash_bytes} bytes hold fewer than {SEGMENTS_MIN} segments of {size}"
            )
