"""The privacy statement of a run: one value, its schema, and the model card around it.

Comes in: files of a run directory. Goes out: Markdown, JSON, a figure. Must not know torch, the model or any row of
data; ``card.py`` must not read ``private/``.
"""
