"""The API process's side of the replicas: which chunk goes where; starting and replacing.

Runs on the event loop, which it never blocks. Knows no HTTP, file or text; only the inline executor brings
torch.
"""
