"""Workers and servers of a run as processes of one host that may come and go."""
