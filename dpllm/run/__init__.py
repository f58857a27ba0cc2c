"""One training run: its promise, its parts, the loop, and what it leaves in a run directory.

Read ``loop.py`` first.
"""
