"""What befalls workers. One file a fault, one line in the union."""

from __future__ import annotations

from .crash import Crash as Crash
from .join import Join as Join
from .random_crashes import RandomCrashes as RandomCrashes

Fault = Crash | Join | RandomCrashes
