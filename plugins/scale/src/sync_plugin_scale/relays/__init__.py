"""Versions that travel in chunks, and workers that pass them on while the rest is on its way.

Reading begins in `chunks`, a transport that is made of a scheme's own. `relay` is a process that
receives chunks and sends them to others.
"""
