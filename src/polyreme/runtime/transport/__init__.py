"""How members that come and go pass letters to each other."""
