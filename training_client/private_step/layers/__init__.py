"""How a model is run: which layers can be clipped, what each use records, and what is proved."""
