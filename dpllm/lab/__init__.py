"""Experiments that stand outside a normal run.

Shadow models, models that were trained elsewhere, gradient leakage. Nothing but the command line may import this room.
"""
