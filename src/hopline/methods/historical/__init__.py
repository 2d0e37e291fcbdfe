"""Historical embeddings: batches of parts, with neighbours' rows from earlier steps.

Read `settings`, `work` (tables, refresh, order of commits) and `step` (one batch). `drift` measures how far stored
rows move, `regularise` drops edges and penalises. State is written in `commit` only, after the optimizer's step.
"""
