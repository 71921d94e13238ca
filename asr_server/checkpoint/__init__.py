"""Where a checkpoint's files are, and what is wrong with them, before anything heavy starts.

No torch: the API process needs them too, for the tokenizer. Every error is one line that says what to do.
"""
