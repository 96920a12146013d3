"""Loops that repair and tidy. Any process may run any keeper; there is no leader."""
