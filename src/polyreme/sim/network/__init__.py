"""What links cost. One file a network, one line in the union."""

from __future__ import annotations

from .hosts import Hosts as Hosts
from .slow_links import SlowLinks as SlowLinks
from .uniform import Uniform as Uniform

Network = Uniform | Hosts | SlowLinks
