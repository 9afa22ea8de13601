"""Versions that all workers of a send commit, or none of them.

Reading begins in `scheme`. `sender` counts the workers that have staged a version and decides,
and `receiver` keeps a staged version until the decision.
`canary` tries a version on some workers first.
"""
