"""From the lengths of a corpus to a plan: steps of packs of pieces. Never sees a token.

A plan is made window by window: documents are drawn in a seeded order, cut by the overflow policy,
packed within a look-ahead window, ordered into slates of like cost, and written block by block with
a snapshot to go on from. Reading a plan back is ``ringfeed.pipeline.plan``.
"""
