"""Numbers as a table of 80 columns shows them."""

from __future__ import annotations

NO_VALUE = "-"
FIGURE_CHARACTERS = 5


def shown(name: str, value: object) -> str:
    """Return a value as people read it: bytes in binary units, fractions shortened."""
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith(("_bytes", "_bytes_s")):
        per_second = "/s" if name.endswith("_s") else ""
        for unit in ("B", "KiB", "MiB", "GiB"):
            if value < 999.5:
                return f"{value:.3g} {unit}{per_second}"
            value /= 1024
        return f"{value:.3g} TiB{per_second}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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


def figure(name: str, value: object) -> str:
    """Return a value as `shown` does, where that takes five characters, and else less exactly: a
    size in seven, any other number in five."""
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith("_bytes"):
        return brief_size(value)
    exact = shown(name, value)
    return exact if len(exact) <= FIGURE_CHARACTERS else brief(value)


def brief_size(size_bytes: float) -> str:
    """Return bytes in at most seven characters."""
    number, unit = shown("_bytes", size_bytes).split()
    value = float(number)
    if value >= 10:
        return f"{value:.0f} {unit}"
    return f"{value:.2g} {unit}" if value >= 1 else f"{value:.1g} {unit}"


def percent(value: float | None) -> str:
    """Return a share as people read it; never 100 % of what is not whole, nor 0 % of some."""
    if value is None:
        return NO_VALUE
    if 0 < value < 0.01:
        return "<1 %"
    if 0.99 < value < 1:
        return ">99 %"
    return f"{value:.0%}".replace("%", " %")
