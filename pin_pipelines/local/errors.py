"""What goes wrong with the local stack. Needs nothing of the ``local`` extra, so the command line can know it."""

from __future__ import annotations


class LocalStackError(RuntimeError):
    """The local stack cannot go on; the message says why and what to do."""
