"""``python -m polyreme``: the same as the command, for launchers that start modules."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
