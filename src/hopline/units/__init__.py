"""Units of work that methods share: a batch as a unit, and losses at outputs that are known.

`job` makes the job of a run, or of a copy of its model. `batch_unit` runs a user's training step on a batch and has the
usual losses. `loss_on_pieces` computes a user's own loss over all seeds at once where the model runs in pieces.
`watched_unit` measures a step that cannot be cut. It
stands on `contract` and below.
"""
