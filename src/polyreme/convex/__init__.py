"""Linear models: losses, penalties, their certificates, and steps over sparse rows."""
