"""Devices, links, hosts, and what is here."""
