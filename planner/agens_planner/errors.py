"""What the planner raises. It stands below agens_engine and cannot use its tree; commands/plan.py maps both.

PlannerError
├── PlannerInputError   the question is wrong: a size, a key, a config, a folder        (exit 2)
└── PlanRefused         the question is fine and the answer is no: it does not fit      (exit 1; plan.py)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PlannerError(Exception):
    """Base of everything the planner raises on purpose; the message is one line."""


class PlannerInputError(PlannerError):
    """A flag, profile, config or checkpoint folder that cannot be planned for. Names the place and the way out."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or the list of what exists: the tail of every message about an unknown name."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(names)}"
