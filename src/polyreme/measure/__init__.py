"""Makes profiles: runs layers and collectives on this machine."""
