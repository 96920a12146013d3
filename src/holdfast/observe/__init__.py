"""Observers: they consume events."""
