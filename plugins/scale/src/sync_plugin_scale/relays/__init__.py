"""Versions that travel in chunks, and workers that pass them on while the rest is on its way.

Reading begins in `chunks`, a scheme that is made of another; `version` has the format of its
chunks. `relay` is a process that receives chunks and sends them to others.
"""
