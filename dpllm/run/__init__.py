"""One training run: its promise, its parts, the loop, and what stays of it in a run directory.

Read ``loop.py`` first.
"""
