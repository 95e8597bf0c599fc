"""Reports and disclosures: what was promised to people, in words and in the fields of registries.

    attack_rates             what an attacker achieves at most, from ε and δ or from a mechanism
    facts                    all facts of a report, from a certificate or from the ledger
    sentences                the facts in plain sentences
    nist_questions           questions after NIST SP 800-226, answered or marked open
    deployments_registry     the record of the OpenDP deployments registry
    model_card               a section for a Hugging Face model card
    rendering                one report in every format: HTML, PDF, JSON, YAML and Markdown

Facts are computed once, and every format is written from the same facts.
"""
