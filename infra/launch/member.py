"""A member of `kvass up`: one role in this process, its settings given as `--config` and `--set`.

It does what `kvass ROLE` does, ends with its supervisor, and is without the program's other
commands, which take 0.15 s of a core to load: several members start at once, on few cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from kvass.common import config as configuration
from kvass.common.errors import KvassError
from kvass.common.membership import Role
from kvass.launch.role import run_role


def main() -> int:
    """Serve until told to stop, or until the supervisor is gone; return the exit code."""
    parser = argparse.ArgumentParser(description="A member of `kvass up`.")
    parser.add_argument("role", choices=get_args(Role))
    parser.add_argument("--id", required=True)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()
    try:
        config = configuration.load(given.config, given.set)
    except KvassError as error:
        print(f"kvass: {error}", file=sys.stderr)
        return 2
    return run_role(given.role, config, given.id, supervised=True)


if __name__ == "__main__":
    sys.exit(main())
