"""Decide which pieces of which documents form which pack of which step.

Read in the order of the data:

1.  ``options``               what a user may set
2.  ``documents``, ``draw``   lengths by id, and the order in which documents are drawn
3.  ``overflow``, ``stream``  documents longer than a pack; pieces in drawing order
4.  ``windows``               the look-ahead: a pool of pieces becomes whole steps, the rest is carried on
5.  ``strategies``, ``slates``, ``best_fit``   how a pool becomes packs
6.  ``rows``, ``cost``, ``tally``   slates, costs, supervised counts, sums for the report
7.  ``writer``, ``snapshots``       blocks, chain, and what a killed run goes on from
8.  ``report``, ``run``             fill and balance; ``run_plan`` does it all
"""
