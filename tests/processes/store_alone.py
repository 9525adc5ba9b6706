"""`kvass store` as its users start it, in a process of its own: by itself, or at a broker."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

START_S = 60.0  # a busy machine
KVASS = (sys.executable, "-m", "kvass.launch.cli")


@dataclass(eq=False)
class NodeProcess:
    """Mutable fields: `said`, all of its log so far, and `_news`."""

    process: subprocess.Popen[str]
    said: str = ""
    _news: threading.Condition = field(default_factory=threading.Condition)

    def listen(self) -> None:
        """Take in its log until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.said += line
                self._news.notify_all()

    def until(self, pattern: str) -> str:
        """Wait for words in its log; return what they say in the pattern's group."""
        with self._news:
            there = self._news.wait_for(lambda: re.search(pattern, self.said, re.M), START_S)
            assert there, f"no {pattern!r} in:\n{self.said}"
            return there[1] if there.groups() else there[0]

    @property
    def address(self) -> str:
        return self.until(r"clients name (\S+),")


@contextmanager
def node(*arguments: str, **environment: str) -> Iterator[NodeProcess]:
    """Run `kvass store` with these arguments; killed at the end."""
    with bounded_node(None, *arguments, **environment) as found:
        yield found


@contextmanager
def bounded_node(
    open_files_max: int | None, *arguments: str, **environment: str
) -> Iterator[NodeProcess]:
    """As `node`, and it may have only so many files and connections open."""

    def bound() -> None:
        if open_files_max is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files_max, open_files_max))

    with subprocess.Popen(
        [*KVASS, "store", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | environment, preexec_fn=bound,
    ) as process:  # fmt: skip
        found = NodeProcess(process)
        listener = threading.Thread(target=found.listen)
        listener.start()
        try:
            yield found
        finally:
            process.kill()
            listener.join()
