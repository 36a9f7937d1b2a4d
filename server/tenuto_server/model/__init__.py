"""Models: configuration, weights, tokenizer, chat template and the dense decoder that runs them.

Nothing is imported here, so that a process which only needs a tokenizer does not pay for torch.
"""
