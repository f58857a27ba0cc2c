"""What dpllm no longer takes, and in one line what to type instead.

Comes in: a key of a recipe, its value, a command with an option or an action. Goes out: the answer. A module that refuses one of
them reads it here, so that an answer stands nowhere else.
"""

RETIRED = {
    # Keys of a recipe, and values of one.
    "audit.canaries.kind: pii": "pii is retired, it needed another package; use audit.canaries.kind: digits, or random_tokens",
    "audit.canaries.kind: rare_tokens": "rare_tokens is retired; use audit.canaries.kind: random_tokens, or digits",
    "audit.canaries.kind: synthetic": "synthetic is retired: its secrets could not be counted; use random_tokens or digits",
    "audit.canaries.prompt": "is retired with the kind synthetic, which alone read it; leave the key out",
    "audit.canaries.temperature": "is retired with the kind synthetic, which alone read it; leave the key out",
    **dict.fromkeys(
        ("audit.guesses", "audit.guesses_in"),
        "is retired: tests follow from the number of canaries, with weights that fall with the rank; leave the key out",
    ),
    **dict.fromkeys(
        ("version", "schema_version", "dpllm", "dpllm_version"),
        "a recipe has no version: it is read by the dpllm that runs, whose keys dpllm plan --keys lists; leave the key out",
    ),
    "privacy.adaptive": "adaptive clipping is retired; leave the key out, and set privacy.clipping: flat or automatic",
    "privacy.clipping: adaptive": "adaptive is retired; automatic has no threshold to tune, and flat takes max_grad_norm",
    "privacy.clipping: per_layer": "per_layer is retired; use flat, or automatic",
    "privacy.grad_sample_mode": "is retired: the form of each gradient follows from public shapes alone; leave the key out",
    # Options and actions of a command, and commands.
    "compare --no-intervals": "no losses of single examples are computed any more, so compare loads no model; leave it out",
    "curve": "type pandas.read_json('RUN/private/metrics.jsonl', lines=True).plot('step', 'loss') in a notebook",
    "plan --after": "adaptive clipping is retired, whose figures it read; privacy.clipping automatic needs no C to be tuned",
    "plan --compare": "it gave no guarantee; dpllm plan --json has epsilon by each accountant, as `accountants`",
    "plan --figure": "plan prints and draws nothing; --json has every figure of the table",
    "plan --sweep": "it planned what several dpllm plan commands plan; type one for each value, as --privacy.epsilon 3",
    "epsilon --trials": "the epsilon of one run does not cover choosing the best of several; let the ledger charge every run",
    "epsilon --select": "it belonged to --trials, which is retired too; let the ledger charge every run",
    "audit --mechanism": "every run checks its engine before it starts; set audit.gradient_canaries: 500, then audit the run",
    "audit --scores-only": "an audit is one scoring pass since nothing is generated any more; leave it out",
    "audit --non-members": "rows that trained elsewhere are not compared any more; plant canaries, and type --canaries FILE",
    "audit --output": "a report on a model trained elsewhere is printed; type --json > FILE to keep it",
    "audit --leakage": "it attacked a gradient, which a released model does not show; examples/gradient_leakage.py does it",
    "train --make-up-lost-steps": "steps that a crash lost stay lost, and the card counts them; leave the option out",
    "sweep --by": "the runs need no list for which someone answers; leave it out",
    "synthesize --baseline": "dpllm classify FOLDER FILE labels evaluation rows with that classifier",
    "synthesize --clip": "votes are clipped as widely as epsilon allows; --batch and --epsilon decide how far that is",
    "synthesize --embedding": "no decision followed from it; see TSTR and the share of repeated words on the card",
    "synthesize --encoder": "it belonged to --baseline, which is retired too; dpllm classify has --encoder",
    "synthesize --schema": "filtering rows costs nothing; drop those that are not JSON of your schema afterwards",
    "synthesize --without-guarantee": "train with differential privacy; to read such texts yourself, dpllm generate RUN",
    "describe --mean": "type --quantiles COLUMN=LOW:HIGH:PARTS --at .5, which one extreme value moves less",
    "describe --rounds": "clusters take five rounds of k-means; leave it out",
    "describe --scripts": "put the script of each row in a column, and type --shares COLUMN=latin,cyrillic",
    "synthesize --engine": "vLLM was never tested with it; leave it out, and transformers draws the texts, 64 at a time",
    "ledger open": "every budget admits runs in any order; dpllm ledger init can correct it before the first run",
    "ledger seal": "lists of runs are retired; for an exact total type --final on train or sweep, once for a dataset",
    "ledger --planned": "planned budgets are retired; leave it out, and for an exact total type --final on train or sweep",
    "ledger --gate": "there is one kind of budget; leave it out, and for an exact total type --final on train or sweep",
    "ledger --reference": "the filter's order follows from --epsilon and --delta; leave it out",
    "ledger --runs": "runs need no list; leave it out, and for an exact total type --final on train or sweep",
    "ledger plot": "it had no effect; dpllm ledger show says what is left, and dpllm ledger metrics tells Prometheus",
    # Attacks of dpllm audit --attack.
    "audit --attack untargeted": "a secret is extracted sooner from its own beginning; type --attack extraction",
    "audit --attack min_k": "Min-K%++ is the same of standardised log-probabilities; type --attack min_k_plus",
    "audit --attack min_k_plus_ratio": "calibrated takes off what the base model knows; type --attack calibrated",
    "audit --attack gains_over_losses": "calibrated separated better without privacy and at epsilon 8; type --attack calibrated",
    "audit --attack rmia": "with the base model as its only reference it orders canaries as loss does; type --attack calibrated",
    "audit --attack completion": "extraction counts the secrets that greedy decoding completes; type --attack extraction",
    "audit --attack windows": "calibrated separated better without privacy and at epsilon 8; type --attack calibrated",
    "audit --attack personal": "extraction counts the samples that a detail takes; type --attack extraction",
}
