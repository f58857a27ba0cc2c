"""The mechanism: plan, sampling, per-example loss, clipping, noise, accounting, and the guards around them.

``plan`` is the promise from which all the others are built. What it costs: ``events``, ``accounting`` with ``privacy_loss`` and
``renyi``. How it runs: ``sampling``, ``loss``, ``rules``, ``gradients``, ``clipping``, ``noise``, ``engine``. What must hold
before it runs: ``guards``, ``selfcheck``.
"""
