"""The `kvass` program for members that tests start one by one: with its options, and supervised as
members of `kvass up` are. They say on standard output when they are ready, and end with the test.
"""

from __future__ import annotations

from functools import partial

from kvass.launch import cli, role


def supervised_main() -> None:
    """Run the program."""
    setattr(cli, "run_role", partial(role.run_role, supervised=True))  # noqa: B010
    cli.main()
