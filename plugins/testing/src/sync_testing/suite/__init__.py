"""Runs the conformance classes for a plugin named on the command line, without a test file.

    pytest --pyargs sync_testing.suite --scheme NAME --option slots=4
    pytest --pyargs sync_testing.suite --layer NAME --tolerance 0.01
    pytest --pyargs sync_testing.suite --workers NAME --report conformance.json

A name may also be ``module:attribute``, for a plugin that is not packaged yet.
"""
