"""The mechanism: plan, sampling, per-example loss, clipping, noise, accounting, and the guards around them.

Each file is one noun; ``plan.py`` is the promise that all the others are built from.
"""
