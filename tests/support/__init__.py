"""Graphs, models, runs and processes that tests share. Programs such as `tests/planted.py` stand beside the tests."""
