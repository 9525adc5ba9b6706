"""Numbers as a table of 80 columns shows them."""

from __future__ import annotations

from kvass.launch.status import shown

NO_VALUE = "-"


def share(part: int, whole: int) -> float | None:
    """Return part ÷ whole; None when there is nothing to be a part of."""
    return part / whole if whole else None


def brief(value: float) -> str:
    """Return a number in at most five characters."""
    for unit in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"


def brief_size(size_bytes: float) -> str:
    """Return bytes in at most seven characters."""
    number, unit = shown("_bytes", size_bytes).split()
    return f"{float(number):.3g} {unit}" if float(number) >= 10 else f"{float(number):.2g} {unit}"


def percent(value: float | None) -> str:
    """Return a share as people read it; never 100 % of what is not whole, nor 0 % of some."""
    if value is None:
        return NO_VALUE
    if 0 < value < 0.01:
        return "<1 %"
    if 0.99 < value < 1:
        return ">99 %"
    return f"{value:.0%}".replace("%", " %")
