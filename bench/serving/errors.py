"""What is raised for a process that was started here."""

from __future__ import annotations

import subprocess


class ProcessFailed(subprocess.SubprocessError):
    """A process died or stopped answering; the message has the end of its standard error."""
