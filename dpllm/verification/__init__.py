"""What a stranger can compute again of a published run: one module for each thing that is looked at.

Comes in: a ``Published``. Goes out: ``Check``s. Files are taken for hostile: each is read with a limit, none is executed,
no link is followed. Must not import torch, transformers, peft or datasets.
"""
