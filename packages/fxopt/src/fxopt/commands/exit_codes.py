"""What the command's exit status says."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit status of `fxopt`; documented in docs/command.md."""

    DONE = 0
    """All is done, and all checks passed."""
    UNFORESEEN = 1
    """Something unforeseen, with a traceback: most likely a mistake in fxopt, or in a plugin."""
    USAGE = 2
    """The command line is wrong: an unknown option or pass, a pipeline that cannot be read."""
    FILE = 3
    """SOURCE, the inputs or the output: missing, unreadable, refused by the model, or there already."""
    CAPTURE = 4
    """The model cannot be captured as a graph, or the graph cannot be saved as an archive."""
    PASS = 5
    """A pass failed."""
    DEMAND = 6
    """``--strict`` or ``--expect`` is not met."""
    DIFFERS = 7
    """The numbers differ by more than is allowed."""
    UNDO = 8
    """Nothing is there to undo, or it cannot be undone."""
    NOTHING_FOUND = 9
    """No culprit was found, or the failure of a reproducer did not happen."""
    INTERRUPTED = 130
    """Interrupted from the keyboard."""
    TERMINATED = 143
    """Terminated by the signal TERM."""
