"""Real rows: members, others, and what words alone tell."""
