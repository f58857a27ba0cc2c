"""The model card of a run: the statement that its files allow, and the page around it.

Comes in: files of a run directory. Goes out: Markdown, JSON, a figure. Must not know torch, the model or any row of data, and
must not read ``private/``.
"""
