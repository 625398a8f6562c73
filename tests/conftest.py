"""Fixtures for every level of tests."""

pytest_plugins = ["tests.support.s3_server"]
