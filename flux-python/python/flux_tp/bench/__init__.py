"""Whole transformer layers with flux_tp beside what a user of PyTorch has without it.

``python -m flux_tp.bench layers`` times them, and ``python -m flux_tp.bench show FILE`` prints a record as tables.
``docs/models.md`` says what is measured.
"""
