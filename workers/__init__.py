"""What needs more than one process: the offline Ray job, the demo, and the full command.

``cli``            the ``ringfeed`` command: ``pipeline.cli`` and the commands that need Ray
``block_builder``  all cp ranks' views of some micro-batches in one pass, for ranks that ask for them
``shard_job``      pre-shard a plan: Ray tasks over ranges of steps
``ray_session``    a local Ray, or the cluster of ``RAY_ADDRESS``
``demo``           the whole line on real text, with training losses compared

Importing this package, or asking for ``--help``, imports neither Ray nor torch.
"""
