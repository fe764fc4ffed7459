"""Attention over a context-parallel share; each backend is a module, imported when it is used.

``allgather``        gathers keys and values of all ranks, masks by document and position; takes any layout
``chunk_context``    what it needs to know of a chunk: documents, windows, the order of keys
``gather``           the differentiable collective below it
``kernels``          what a kernel is that attends once all keys are there
``block_attention``  one of SDPA, in bounded memory, on any device
``query_blocks``     which queries share a range of keys
``flex_blocks``      one of FlexAttention, for devices that train with it
``flex_mask``        its mask, from local queries to a chunk's keys
``block_counts``     which blocks of keys that mask shows
``hf``               ``allgather`` in unchanged Hugging Face models, as ``attn_implementation="ringfeed"``
``hf_mask``          what mask such a model asks for, without building it
``te``               sets TransformerEngine's modules up for the cp and tp ranks; takes the layout ``te``
``te_communication`` how these exchange keys and values, a choice
``te_limits``        what to watch in a batch for them
``torch_cp``         torch's ring over SDPA, one document a chunk; takes the layout ``head_tail``
``ring_context``     the context itself, which can be entered again
``dispatcher``       torch's private switches of the ring, in one place
``sdpa_hooks``       hooks that take masks away and show SDPA that its operands are sharded
``sdpa_swap``        what stands for SDPA meanwhile
``flex_cp``          torch's FlexAttention CP; takes the layouts ``head_tail``, ``contiguous`` and ``ptrr``
``magi``             MagiAttention over shares of the layout ``magi``
``magi_keys``        its keys, and the check that it deals tokens out alike
``magi_package``     whether it is installed, and what is wrong if not
"""
