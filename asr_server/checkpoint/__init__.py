"""Find a checkpoint's files and report what is wrong with them before an engine starts.

Runs in every process; imports no torch and loads no weights. Each error is one line that says what to do.
"""
