"""The privacy budget of each dataset, across all runs.

Comes in: budgets, accounting events, keyed hashes of records. Goes out: reservations, refusals, history. Must not know
models or training. Read ``ledger.py`` first, then ``admission.py``.

Guarantee:
    In a ledger that only dpllm writes, everything ever reserved for a dataset with a budget is, together,
    (epsilon, delta)-differentially private with the budget's epsilon and delta, for its unit and relation, even if each run
    is chosen after seeing all earlier results; or it is a single reservation that came first and closed the account for good.
    A reservation counts in full whether its run completed, stopped or crashed, until a named person reconciles it.
    Concurrent processes cannot overspend, and no reservation executes more steps than it paid for, or one step twice.

    The ledger binds the code of dpllm. It does not stop anyone who trains without it, changes every record a little
    and renames the data, deletes the file or rewrites it completely: the hash chain reveals an edit in the middle, but a
    chain that was cut or recomputed only contradicts a head that was copied elsewhere, such as to run.json.
"""

from dpllm.ledger.chain import Entry
from dpllm.ledger.ledger import Ledger, open_ledger
from dpllm.ledger.store import default_path
from dpllm.ledger.values import Budget, Claim, Outlook, Run, RunRequest

__all__ = ["Budget", "Claim", "Entry", "Ledger", "Outlook", "Run", "RunRequest", "default_path", "open_ledger"]
