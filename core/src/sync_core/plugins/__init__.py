"""Plugins: how they are found, checked and called, and what they are told."""
