"""How a long preparation tells its caller where it is."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bars

__all__ = ["ConsoleProgress", "Progress", "SilentProgress"]


class Progress(Protocol):
    """Receives the stages of a preparation. Called from one thread."""

    def stage(self, name: str, total: int) -> None:
        """A stage begins, and with it the one before ends. `total` is in steps, at least 1."""

    def advance(self, steps: int = 1) -> None:
        """So many steps of the running stage are done."""

    def note(self, message: str) -> None:
        """One line for the user, such as why a cache is rebuilt."""


class SilentProgress:
    """Shows nothing."""

    def stage(self, name: str, total: int) -> None:
        pass

    def advance(self, steps: int = 1) -> None:
        pass

    def note(self, message: str) -> None:
        pass


class ConsoleProgress:
    """Bars on a terminal, one plain line a stage anywhere else. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Bars(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> ConsoleProgress:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._finish_task()
        self._bars.stop()

    def stage(self, name: str, total: int) -> None:
        self._finish_task()
        self._task = self._bars.add_task(name, total=total)
        if not self._console.is_terminal:
            self._console.print(name, markup=False, highlight=False, soft_wrap=True)

    def advance(self, steps: int = 1) -> None:
        if self._task is not None:
            self._bars.advance(self._task, steps)

    def note(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _finish_task(self) -> None:
        if self._task is not None:
            total = self._bars.tasks[self._task].total
            self._bars.update(self._task, completed=total)
            self._task = None
