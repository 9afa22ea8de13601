"""Hosts of the tests of networks, the switch between them, and programs on them."""
